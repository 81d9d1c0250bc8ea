// Edges sorted by row: a counting sort, stable, on several threads.
#include "graph.h"

#include "memory.h"

namespace fastattn::FASTATTN_ISA {
namespace {

struct Range {
  int64_t begin, end;
};
FASTATTN_INLINE Range share(int64_t total, int64_t part, int64_t parts) {
  return {total * part / parts, total * (part + 1) / parts};
}

// I: what is read, O: what is written.
template <class I, class O>
struct Sort {
  const GraphCsrParams& p;
  const Parallel& parallel;
  // Edges and rows are dealt out in equal parts. counts[part][row] is the number of a part's edges in the
  // row, then where the next of them goes.
  int64_t parts, rows = p.row.nodes;
  Buffer<O> counts{parts * rows};
  Buffer<int64_t> totals{parts}, bad{2 * parts};

  const I* row = static_cast<const I*>(p.row.data);
  const I* col = static_cast<const I*>(p.col.data);

  void count(int64_t part) {
    O* own = counts.data() + part * rows;
    for (int64_t i = 0; i < rows; ++i) own[i] = 0;
    int64_t bad_row = -1, bad_col = -1;
    const Range edges = share(p.edges, part, parts);
    for (int64_t e = edges.end - 1; e >= edges.begin; --e) {
      // As unsigned numbers negative ones are too large as well.
      const uint64_t r = uint64_t(int64_t(row[e * p.row.stride])),
                     c = uint64_t(int64_t(col[e * p.col.stride]));
      if (c >= uint64_t(p.col.nodes)) bad_col = e;
      if (r >= uint64_t(rows))
        bad_row = e;
      else
        ++own[r];
    }
    bad.data()[2 * part] = bad_row;
    bad.data()[2 * part + 1] = bad_col;
  }

  void total(int64_t part) {
    const Range own = share(rows, part, parts);
    int64_t sum = 0;
    for (int64_t other = 0; other < parts; ++other)
      for (int64_t i = own.begin; i < own.end; ++i) sum += counts.data()[other * rows + i];
    totals.data()[part] = sum;
  }

  void place(int64_t part) {
    int64_t next = 0;
    for (int64_t other = 0; other < part; ++other) next += totals.data()[other];
    const Range own = share(rows, part, parts);
    for (int64_t i = own.begin; i < own.end; ++i) {
      p.rowptr[i] = next;
      for (int64_t other = 0; other < parts; ++other) {
        O& entry = counts.data()[other * rows + i];
        const O number = entry;
        entry = O(next);
        next += number;
      }
    }
  }

  void scatter(int64_t part) {
    O* own = counts.data() + part * rows;
    O *out_col = static_cast<O*>(p.out_col), *out_perm = static_cast<O*>(p.out_perm);
    const Range edges = share(p.edges, part, parts);
    for (int64_t e = edges.begin; e < edges.end; ++e) {
      const O at = own[row[e * p.row.stride]]++;
      out_col[at] = O(col[e * p.col.stride]);
      out_perm[at] = O(e);
    }
  }

  int64_t first_bad(int64_t which) const {
    for (int64_t part = 0; part < parts; ++part)
      if (bad.data()[2 * part + which] >= 0) return bad.data()[2 * part + which];
    return -1;
  }

  GraphCsrResult run() {
    const auto each = [&](auto step) {
      for_each_task(parallel, parts, [&](int64_t part, int) { (this->*step)(part); });
    };
    each(&Sort::count);
    const GraphCsrResult result{first_bad(0), first_bad(1)};
    if (result.bad_row >= 0 || result.bad_col >= 0) return result;
    each(&Sort::total);
    each(&Sort::place);
    p.rowptr[rows] = p.edges;
    each(&Sort::scatter);
    return result;
  }
};

template <class I, class O>
GraphCsrResult sort(const GraphCsrParams& p, const Parallel& parallel) {
  // An edge takes about ten operations' time at each step. Counters take no more memory than the edges.
  const Parallel worth = parallel.worth(100.0 * double(p.edges));
  const int64_t affordable = 1 + 2 * p.edges / max(p.row.nodes, 1);
  return Sort<I, O>{p, worth, min(worth.threads, affordable)}.run();
}

GraphCsrResult csr(const GraphCsrParams& p, const Parallel& parallel) {
  if (p.row.wide) return (p.wide ? sort<int64_t, int64_t> : sort<int64_t, int32_t>)(p, parallel);
  return (p.wide ? sort<int32_t, int64_t> : sort<int32_t, int32_t>)(p, parallel);
}

}  // namespace

extern const GraphKernels graph_kernels;
const GraphKernels graph_kernels{csr};

}  // namespace fastattn::FASTATTN_ISA
