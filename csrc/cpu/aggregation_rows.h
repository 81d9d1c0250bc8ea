// What the kernels of aggregation share: features cut into tiles of vectors, nodes that can be read a vector
// at a time, and the edges of a chunk as pointers and weights.
//
// A chunk of edges is gone through once per tile of features: the sums of a row stay in registers, and the
// inner loop over its edges only loads and adds. Rows of x come from anywhere in memory, so the loop asks for
// those some edges ahead, all cache lines of the tile, also across the ends of rows.
#pragma once
#include <algorithm>

#include "aggregation.h"
#include "dtype.h"
#include "memory.h"

namespace fastattn::FASTATTN_ISA {
namespace {

// The alphabet of these kernels. T is the dtype of features, A<T> what they are summed in. Drivers are
// compiled once for each of the latter, S: only the loops over vectors know features' dtype, and whether the
// indices that they compare are wide.
template <class T>
using A = typename AccumulatorOf<T>::type;
template <class T>
constexpr int N = kLanes<A<T>>;

template <class F>
void with_index(bool wide, F&& f) {
  wide ? f(int64_t{}) : f(int32_t{});
}

// A row's features are cut into tiles of some vectors each. Kernels are compiled for a few widths of them:
// what programs mostly do has many, the rest gets by with fewer and so with less time to compile.
template <int... kWidth>
struct Widths {};
using AllWidths = Widths<1, 2, 4, 8>;
using FewWidths = Widths<1, 4>;
using OneWidth = Widths<1>;
template <class T>
constexpr bool kFrequent = kSame<T, float> || kSame<T, bf16>;
inline bool is_frequent(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16; }
template <class T>
struct WidthsOf {
  using type = FewWidths;
};
template <>
struct WidthsOf<float> {
  using type = AllWidths;
};
template <>
struct WidthsOf<bf16> {
  using type = AllWidths;
};
template <class T>
using AllowedWidths = typename WidthsOf<T>::type;

// Vectors overlap at the end of a row where F is no multiple of the lanes, or the tile one vector wider than
// need be: what is computed twice is the same twice. Fewer features than lanes are one vector, read over the
// row's end.
struct Tile {
  int64_t begin, width, last;  // vector v starts at begin + min(lanes * v, last)
};
template <int V, class T>
FASTATTN_INLINE int64_t vector_at(const Tile& tile, int v) {
  return tile.begin + (v == V - 1 ? tile.last : v == V - 2 ? min(v * N<T>, tile.last) : v * N<T>);
}

// Tiles of one width beside each other. A row goes through all of them before the next row does: its
// neighbours' memory pages, more than the processor keeps track of, are then looked up once.
struct Tiles {
  int64_t begin, width, last, count;  // `last` of the last of them
  template <class T>
  FASTATTN_INLINE Tile at(int64_t i) const {
    return {begin + i * width * N<T>, width, i == count - 1 ? last : (width - 1) * N<T>};
  }
};

// f(tiles, std::integral_constant<int, their width>) until they cover all features.
template <class T, int... kWidth, class F>
FASTATTN_INLINE void for_each_width(Widths<kWidth...>, int64_t features, F&& f) {
  const int64_t vectors = max((features + N<T> - 1) / N<T>, 1);
  for (int64_t first = 0; first < vectors;) {
    const int64_t left = vectors - first;
    int64_t width = 1;
    ((width = left >= kWidth || (left + 1 == kWidth && left > 2) ? kWidth : width), ...);
    const int64_t count = max(left / width, 1), begin = first * N<T>,
                  last_begin = begin + (count - 1) * width * N<T>;
    const Tiles tiles{begin, width, min((width - 1) * N<T>, max(features - N<T>, 0) - last_begin), count};
    ((width == kWidth ? f(tiles, std::integral_constant<int, kWidth>{}) : void()), ...);
    first += count * width;
  }
}

// Fewer elements than there are lanes, 8, 4, 2 and 1 at a time: a call of memcpy takes longer than a short
// row.
template <int kLanes, class E>
FASTATTN_INLINE void copy_some(E* to, const E* from, int64_t count) {
  for (int n = kLanes / 2; n > 0; n /= 2)
    if (count & n) {
      __builtin_memcpy(to, from, n * sizeof(E));
      to += n;
      from += n;
    }
}

// One of V vectors.
template <int V, class T>
FASTATTN_INLINE void store_features(T* p, int64_t features, Vec<A<T>> v) {
  if (V > 1 || features >= N<T>) return round_store(p, v);
  T buffer[N<T>];
  round_store(buffer, v);
  copy_some<N<T>>(p, buffer, features);
}

// Heads beside each other in memory are one head of H F features, where nothing tells heads apart.
FASTATTN_INLINE bool heads_adjoin(const View& v, int64_t H, int64_t F) {
  return !v.data || H <= 1 || v.stride[2] == F;
}

// The rows of one tensor (B, nodes, H, F), `bytes` to an element, readable for a whole vector of `lanes`
// elements each. Of the last few nodes, where that would leave the tensor, there are padded copies.
class Nodes {
 public:
  Nodes(const View& v, int64_t bytes, int64_t B, int64_t nodes, int64_t H, int64_t F, int64_t lanes)
      : v_(v),
        bytes_(bytes),
        H_(H),
        size_(lanes * bytes),
        stride_(v.stride[1] * bytes),
        copies_(!v.data || F >= lanes ? 0
                : stride_             ? min(nodes, ((lanes - F) * bytes + stride_ - 1) / stride_)
                                      : min(nodes, 1)),
        safe_(stride_   ? nodes - copies_
              : copies_ ? 0
                        : nodes),
        padded_(B * H * copies_ * size_) {
    if (!copies_) return;
    std::memset(padded_.data(), 0, size_t(B * H * copies_ * size_));
    for (int64_t plane = 0; plane < B * H; ++plane)
      for (int64_t i = 0; i < copies_; ++i)
        std::memcpy(padded_.data() + (plane * copies_ + i) * size_,
                    start(plane / H, plane % H) + (safe_ + i) * stride_, size_t(F * bytes));
  }
  // Pointers to the rows of head h of batch b.
  struct Plane {
    const char *data, *padded;  // null: none are needed
    int64_t stride, padded_stride, safe;
    FASTATTN_INLINE const void* operator[](int64_t node) const {
      return node < safe ? data + node * stride : padded + (node - safe) * padded_stride;
    }
  };
  Plane plane(int64_t b, int64_t h) const {
    const char* padded = copies_ ? padded_.data() + (b * H_ + h) * copies_ * size_ : nullptr;
    return {start(b, h), padded, stride_, stride_ ? size_ : 0, safe_};
  }

 private:
  const char* start(int64_t b, int64_t h) const {
    return static_cast<const char*>(v_.data) + (b * v_.stride[0] + h * v_.stride[2]) * bytes_;
  }
  const View& v_;
  int64_t bytes_, H_, size_, stride_, copies_, safe_;
  Buffer<char> padded_;
};

// How many edges ahead rows are fetched: so many that additions in registers last as long as memory takes.
// Fetching further ahead, rows would leave the first cache again before their turn.
template <class T>
FASTATTN_INLINE int64_t edges_ahead(int64_t width) {
  constexpr int64_t kAdditions = 128, kMost = 32, kLeast = 4;
  return min(max(kAdditions * int64_t(sizeof(A<T>) / sizeof(T)) / width, kLeast), kMost);
}
constexpr int64_t kPadding = 32;  // edges_ahead at most

// Elements [begin, begin + kCount) of a row.
template <int kCount, class E>
FASTATTN_INLINE void prefetch(const void* row, int64_t begin) {
  constexpr int kBytes = kCount * int(sizeof(E));
  const char* p = reinterpret_cast<const char*>(static_cast<const E*>(row) + begin);
  for (int byte = 0; byte < kBytes; byte += 64) __builtin_prefetch(p + byte);
}

// In the time that waiting for memory takes, a core could do some hundred operations per edge and some more
// per feature.
FASTATTN_INLINE double operations_of_edge(int64_t F) { return double(200 + 16 * F); }
FASTATTN_INLINE double operations(const GraphView& graph, int64_t B, int64_t H, int64_t F) {
  return double(graph.edges + graph.rows) * double(B * H) * operations_of_edge(F);
}

// All cuts of a graph, and room for the partial results of the rows that they divide.
struct Cuts {
  EdgeSplit split;
  Buffer<EdgeCut> at;
  Buffer<int64_t> divisions;  // cuts before this one that divide a row
  int64_t slots = 0;

  Cuts(const GraphView& graph, int64_t features)
      : split(split_edges(graph.rowptr, graph.rows, least(features))),
        at(split.chunks + 1),
        divisions(split.chunks + 1) {
    for (int64_t k = 0; k <= split.chunks; ++k) {
      const EdgeCut cut = at.data()[k] = edge_cut(split, k);
      divisions.data()[k] = slots / 2;
      if (cut.row < split.rows && cut.edge > split.rowptr[cut.row]) slots += 2;
    }
  }
  // Of the edges of a chunk: an eighth of what is worth a thread.
  static int64_t least(int64_t features) {
    return max(int64_t(Parallel::kWorth / 8 / operations_of_edge(features)), kLeastEdges);
  }
  // The slot of a chunk's head or tail, where it has one.
  int64_t head(int64_t k) const { return 2 * divisions.data()[k]; }
  int64_t tail(int64_t k) const { return 2 * divisions.data()[k + 1] + 1; }
};

// A chunk of edges.
struct Chunk {
  const EdgeSplit& split;
  EdgeCut from, to;
  Chunk(const Cuts& cuts, int64_t k)
      : split(cuts.split), from(cuts.at.data()[k]), to(cuts.at.data()[k + 1]) {}
  int64_t edges() const { return to.edge - from.edge; }
};

// `byte` throughout the rows, `width` bytes each, that no edge of a chunk enters. Rows of a cache line or
// less are sooner written than looked for: those with edges get what they hold afterwards.
inline void fill_empty_rows(const Chunk& chunk, void* rows, int64_t width, int byte) {
  const auto fill = [&](int64_t first, int64_t last) {
    std::memset(static_cast<char*>(rows) + first * width, byte, size_t((last - first) * width));
  };
  width <= 64 ? fill(chunk.from.row, chunk.to.row)
              : for_each_empty_run(chunk.split, chunk.from, chunk.to, fill);
}

// What it takes to read a row for every edge of a chunk. Some pointers follow the last edge's, to be
// prefetched.
__attribute__((noinline)) void point(const Chunk& chunk, const GraphView& graph, const Nodes::Plane& nodes,
                                     const void** to) {
  const int64_t edges = chunk.edges();
  with_index(graph.wide, [&]<class I>(I) {
    const I* col = static_cast<const I*>(graph.col) + chunk.from.edge;
    if (!nodes.padded)
      for (int64_t i = 0; i < edges; ++i) to[i] = nodes.data + col[i] * nodes.stride;
    else
      for (int64_t i = 0; i < edges; ++i) to[i] = nodes[col[i]];
  });
  for (int64_t i = edges; i < edges + kPadding; ++i) to[i] = edges ? to[edges - 1] : nullptr;
}
// The same for the rows' own nodes.
inline void point_at_rows(const Chunk& chunk, const Nodes::Plane& nodes, const void** to) {
  for_each_row(chunk.split, chunk.from, chunk.to, [&](int64_t row, int64_t begin, int64_t end, RowPart) {
    if (begin < end) std::fill(to + begin - chunk.from.edge, to + end - chunk.from.edge, nodes[row]);
  });
}

// The caller's numbers of the edges of a chunk.
template <class Number>
__attribute__((noinline)) void number_edges(const Chunk& chunk, const GraphView& graph, Number* to) {
  const int64_t edges = chunk.edges(), first = chunk.from.edge;
  with_index(graph.wide, [&]<class I>(I) {
    const I* perm = static_cast<const I*>(graph.perm);
    for (int64_t i = 0; i < edges; ++i) to[i] = Number(perm ? perm[first + i] : first + i);
  });
}

// weight[i] = sign * edge_weight[e, h] * col_scale[m] for the edges of a chunk.
template <class S>
__attribute__((noinline)) void weigh(const Chunk& chunk, const GraphView& graph, const View& edge_weight,
                                     int64_t h, const void* col_scale, S sign, S* weight) {
  const int64_t edges = chunk.edges(), first = chunk.from.edge, stride = edge_weight.stride[0];
  with_index(graph.wide, [&]<class I>(I) {
    const I *perm = static_cast<const I*>(graph.perm), *col = static_cast<const I*>(graph.col) + first;
    if (edge_weight.data)
      with_dtype_beside<S>(edge_weight.dtype, [&]<class W>(W) {
        const W* own = static_cast<const W*>(edge_weight.data) + h * edge_weight.stride[1];
        for (int64_t i = 0; i < edges; ++i)
          weight[i] = sign * S(to_float(own[(perm ? perm[first + i] : first + i) * stride]));
      });
    else
      std::fill(weight, weight + edges, sign);
    const S* scale = static_cast<const S*>(col_scale);
    for (int64_t i = 0; scale && i < edges; ++i) weight[i] *= scale[col[i]];
  });
}

FASTATTN_INLINE void round_to(float* p, float x) { *p = x; }
FASTATTN_INLINE void round_to(double* p, double x) { *p = x; }
FASTATTN_INLINE void round_to(f16* p, float x) { p->bits = f16_round(x); }
FASTATTN_INLINE void round_to(bf16* p, float x) {
  const uint32_t u = bit_cast<uint32_t>(x);
  p->bits = x == x ? uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16) : uint16_t(0x7fc0u);
}

// What the edges of a chunk read where an arg selects some of them, feature by feature.
struct Selection {
  const void** arg = nullptr;    // per edge of the chunk: a row
  const void* number = nullptr;  // likewise: what the elements of the row are compared with

  void take(Arena& arena, const Chunk& chunk, const GraphView& graph) {
    arg = arena.take<const void*>(chunk.edges() + kPadding);
    with_index(graph.wide, [&]<class I>(I) {
      I* numbers = arena.take<I>(chunk.edges());
      number_edges(chunk, graph, numbers);
      number = numbers;
    });
  }
  void point_to(const Chunk& chunk, const GraphView& graph, const Nodes::Plane& args, bool of_rows) const {
    of_rows ? point_at_rows(chunk, args, arg) : point(chunk, graph, args, arg);
  }
  // Lanes [at, at + lanes of S) that edge i is selected for.
  template <class S, class I>
  FASTATTN_INLINE Vec<Int<S>> lanes(int64_t i, int64_t at) const {
    typedef I Indices __attribute__((vector_size(kLanes<S> * sizeof(I))));
    Indices v;
    __builtin_memcpy(&v, static_cast<const I*>(arg[i]) + at, sizeof v);
    return __builtin_convertvector(v == static_cast<const I*>(number)[i], Vec<Int<S>>);
  }
};
// f(I{}, widths) for the kernels that compare: indices are usually as wide as lanes.
template <class T, class Usual, class F>
FASTATTN_INLINE void with_compared_index(bool wide, Usual usual, F&& f) {
  with_index(wide, [&]<class I>(I i) {
    if constexpr (sizeof(I) == sizeof(A<T>))
      f(i, usual);
    else
      f(i, OneWidth{});
  });
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
