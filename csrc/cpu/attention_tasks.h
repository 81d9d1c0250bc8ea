// A call as problems, and their work as tasks. Sequences of one length are one problem together; where each
// has lengths of its own it is a problem by itself, and nothing below this file knows of packing.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "attention_problem.h"

namespace fastattn::FASTATTN_ISA {
namespace {

inline void move_to(View& view, int64_t b, int64_t row) {
  const int64_t bytes = view.dtype == DType::f64 ? 8 : view.dtype == DType::f32 ? 4 : 2;
  if (view.data) view.data = static_cast<char*>(view.data) + offset(view, b, 0, row) * bytes;
}
// Leaves sequence b alone in p.
inline void select_sequence(AttentionParams& p, int64_t b) {
  const Sequence s = p.sequences[b];
  p.seed += uint64_t(offset(p.lse, b, 0, s.query)) * kRowStep;
  for (View* view : {&p.query, &p.out, &p.lse}) move_to(*view, b, s.query);
  if (!s.pages)
    for (View* view : {&p.key, &p.value}) move_to(*view, b, s.key);
  move_to(p.alibi, b, 0);
  p.B = 1, p.L = s.L, p.S = s.S, p.pages = s.pages, p.sequences = nullptr;
}
inline void select_sequence(AttentionGradParams& p, int64_t b) {
  const Sequence s = p.sequences[b];
  for (View* view : {&p.grad_out, &p.grad_lse, &p.grad_query}) move_to(*view, b, s.query);
  for (View* view : {&p.grad_key, &p.grad_value}) move_to(*view, b, s.key);
  for (View* view : {&p.grad_alibi, &p.grad_sinks}) move_to(*view, b, 0);
  select_sequence(static_cast<AttentionParams&>(p), b);
}

template <class T, class P>
class Problems {
 public:
  explicit Problems(const P& params) : params_(params), whole_(params) {}
  int64_t count() const { return params_.sequences ? params_.B : 1; }
  // f(problem, its params)
  template <class F>
  void with(int64_t n, F&& f) const {
    std::optional<P> params;
    std::optional<Problem<T>> problem;
    if (params_.sequences) {
      params.emplace(params_);
      select_sequence(*params, n);
      problem.emplace(*params);
    }
    f(problem ? *problem : whole_, params ? *params : params_);
  }

 private:
  const P& params_;
  Problem<T> whole_;
};

// What a problem, or all of them, amounts to.
struct Work {
  int64_t heads = 0, tiles = 0;  // key/value heads and all their tiles
  double keys = 0;               // that the tiles visit; what else a tile takes counts as some more
  template <class T>
  void add(const Problem<T>& problem) {
    const int64_t count = problem.p.B * problem.p.Hkv;
    heads += count;
    tiles += count * problem.tiles;
    keys += double(count * problem.tiles) * keys_per_tile(problem);
  }
  template <class T>
  static double keys_per_tile(const Problem<T>& problem) {
    return double(max(0, problem.key_end - problem.key_begin) + 16);
  }
};

#if defined(__AMX_BF16__)
// What is gained by products of parts, in nanoseconds: a tile and kBlock keys take less the more columns
// there are, but tiles and keys must be packed. Measured beside Plain.
inline double gain_of_parts(const Problem<float>& problem, double tiles) {
  const AttentionParams& p = problem.p;
  const double columns = double(p.D + p.Dv), padded = double(problem.depth + problem.depth_v);
  const double of_block = 41 * columns - 20 * padded - 700;
  if (of_block <= 0 || problem.tiles == 0) return 0;
  double keys = 0;
  for (int64_t i = 0; i < p.L; i += kTile<float>) {
    int64_t lo, hi, begin, end;
    problem.band(i, begin, hi);
    problem.band(min(i + kTile<float>, p.L) - 1, lo, end);
    keys += double(max(0, end - begin));
  }
  const double own = double(problem.tiles), per_task = min(own, max(4.0, min(16.0, tiles / 16)));
  const double visits = double(problem.group) * keys / kBlock * min(1.0, double(p.L) / kTile<float>);
  const double blocks = own / per_task * double(max(0, problem.key_end - problem.key_begin)) / kBlock;
  return double(p.B * p.Hkv) * (of_block * visits - 33 * columns * blocks - 6 * columns * own);
}
#endif
// Whether these kernels are the best for a call: where bf16 has products of its own, any other dtype must
// gain from them.
inline bool suits(const AttentionParams& p) {
  if (!kPairs<bf16>) return true;
  if (p.query.dtype == DType::bf16) return true;
#if defined(__AMX_BF16__)
  if (p.query.dtype == DType::f64 || p.Hkv == 0 || p.H / p.Hkv * p.L < 64) return false;
  if (p.S < 64 && !p.sequences) return false;  // the S of paged caches is that of a page
  const Problems<float, AttentionParams> problems(p);
  Work all;
  double gain = 0;
  for (int64_t n = 0; n < problems.count(); ++n)
    problems.with(n, [&](const Problem<float>& problem, const AttentionParams&) { all.add(problem); });
  for (int64_t n = 0; n < problems.count(); ++n)
    problems.with(n, [&](const Problem<float>& problem, const AttentionParams&) {
      gain += gain_of_parts(problem, double(all.tiles));
    });
  return gain > 0;
#else
  return false;
#endif
}

// The tasks of all problems in one row, those of the largest first, and the tasks that merge what they found.
// A Plan says how one problem is cut: into how many `tasks` and `merges`, and what `memory` they share.
template <class Plan>
class Schedule {
 public:
  struct Part {
    Plan plan;
    int64_t problem;
    double work;
    int64_t task, merge, memory;  // the first of its own
  };
  int64_t tasks = 0, merges = 0, memory = 0;

  template <class T, class P, class... Options>
  explicit Schedule(const Problems<T, P>& problems, const Options&... options) {
    Work all;
    parts_.reserve(size_t(problems.count()));
    for (int64_t n = 0; n < problems.count(); ++n)
      problems.with(n, [&](const Problem<T>& problem, const P&) { all.add(problem); });
    for (int64_t n = 0; n < problems.count(); ++n)
      problems.with(n, [&](const Problem<T>& problem, const P& p) {
        Work own;
        own.add(problem);
        parts_.push_back({Plan(problem, p, all, options...), n, own.keys, 0, 0, 0});
      });
    if (parts_.size() > 1)
      std::sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) {
        return a.work != b.work ? a.work > b.work : a.problem < b.problem;
      });
    for (Part& part : parts_) {
      part.task = tasks, part.merge = merges, part.memory = memory;
      tasks += part.plan.tasks, merges += part.plan.merges, memory += part.plan.memory;
    }
  }
  const Part& of_task(int64_t task) const { return last_before(&Part::task, task); }
  const Part& of_merge(int64_t merge) const { return last_before(&Part::merge, merge); }
  const std::vector<Part>& parts() const { return parts_; }

 private:
  const Part& last_before(int64_t Part::* first, int64_t at) const {
    auto after = std::upper_bound(parts_.begin(), parts_.end(), at,
                                  [first](int64_t x, const Part& part) { return x < part.*first; });
    return *std::prev(after);
  }
  std::vector<Part> parts_;
};

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
