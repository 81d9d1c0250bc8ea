// The work of a graph kernel cut by edges, whatever the degrees: no row is too long for one thread.
#pragma once
#include <cstdint>

namespace fastattn {

// A graph as kernels read it: for every row (a target, or a source in the transpose) the nodes at the other
// end of its edges. A row's edges are in the caller's order.
struct GraphView {
  int64_t rows, edges;
  const int64_t* rowptr;  // (rows + 1)
  const void* col;        // (edges), int32_t or int64_t
  const void* perm;       // (edges), likewise: the caller's number of an edge; null = already in this order
  bool wide;              // indices are int64_t
};

__attribute__((always_inline)) static inline int64_t index_at(const void* indices, bool wide, int64_t at) {
  return wide ? static_cast<const int64_t*>(indices)[at] : static_cast<const int32_t*>(indices)[at];
}
// The node at the other end of the edge at a position of a graph's order, and the caller's number of the
// edge.
__attribute__((always_inline)) static inline int64_t other_end(const GraphView& graph, int64_t at) {
  return index_at(graph.col, graph.wide, at);
}
__attribute__((always_inline)) static inline int64_t edge_number(const GraphView& graph, int64_t at) {
  return graph.perm ? index_at(graph.perm, graph.wide, at) : at;
}

// Chunks of about `step` edges and rows together, so that rows without edges count too. Where a cut falls
// into a short row it moves to the row's start; a long row is divided. The cuts depend on the graph alone:
// results do not change with the number of threads.
struct EdgeSplit {
  const int64_t* rowptr;
  int64_t rows, step, chunks;
};

// Chunk k holds what lies between cuts k and k + 1, at most 5/4 step edges. edge > rowptr[row] where the cut
// divides the row; never at its end.
struct EdgeCut {
  int64_t row, edge;
};

constexpr int64_t kLeastEdges = 256;
static inline EdgeSplit split_edges(const int64_t* rowptr, int64_t rows, int64_t least = kLeastEdges) {
  // 512 chunks balance dozens of threads; chunks larger than 2048 would not keep their indices and weights in
  // a core's own cache.
  constexpr int64_t kChunks = 512, kMost = 2048;
  const int64_t work = rows + rowptr[rows], even = work / kChunks;
  const int64_t step = even < least ? least : even > kMost ? kMost : even;
  return {rowptr, rows, step, (work + step - 1) / step};
}

static inline EdgeCut edge_cut(const EdgeSplit& split, int64_t k) {
  if (k <= 0) return {0, 0};
  if (k >= split.chunks) return {split.rows, split.rowptr[split.rows]};
  const int64_t at = k * split.step;
  int64_t row = 0;  // the last one that begins at or before `at`
  for (int64_t end = split.rows; end - row > 1;) {
    const int64_t middle = row + (end - row) / 2;
    (split.rowptr[middle] + middle <= at ? row : end) = middle;
  }
  const int64_t begin = split.rowptr[row], degree = split.rowptr[row + 1] - begin;
  const int64_t inside = at - begin - row;
  if (4 * degree <= split.step || inside == 0) return {row, begin};
  return inside < degree ? EdgeCut{row, begin + inside} : EdgeCut{row + 1, begin + degree};
}

// The part of a row that lies in a chunk. A row that is whole is finished by its chunk; the others leave
// partial results, the first chunk of a row as its `tail`, the following ones as their `head`.
enum class RowPart { whole, head, tail };

// The rows that begin in a chunk or have edges in it, one after the other:
// for (RowCursor at(split, from, to); at.next();) at.row, at.begin, at.end, at.part
// or only those with edges there, by at.next_with_edges().
struct RowCursor {
  const int64_t *rowptr, rows, last_row, last_edge;
  int64_t row, begin, end;
  RowPart part;

  RowCursor(const EdgeSplit& split, EdgeCut from, EdgeCut to)
      : rowptr(split.rowptr),
        rows(split.rows),
        last_row(to.row),
        last_edge(to.edge),
        row(from.row - 1),
        end(from.edge) {}
  bool next() {
    begin = end;
    if (++row < last_row) {
      end = rowptr[row + 1];
      part = begin == rowptr[row] ? RowPart::whole : RowPart::head;
      return true;
    }
    if (row > last_row || row >= rows || begin >= last_edge) return false;
    end = last_edge;
    part = begin == rowptr[row] ? RowPart::tail : RowPart::head;
    return true;
  }
  bool next_with_edges() {
    while (next())
      if (begin < end) return true;
    return false;
  }
};
// f(first, last) for the runs of rows without edges, last excluded, among those that begin in a chunk.
template <class F>
static inline void for_each_empty_run(const EdgeSplit& split, EdgeCut from, EdgeCut to, F&& f) {
  const int64_t* rowptr = split.rowptr;
  for (int64_t row = from.row; row < to.row; ++row) {
    const int64_t first = row;
    while (row < to.row && rowptr[row + 1] == rowptr[row]) ++row;
    if (row > first) f(first, row);
  }
}
template <class F>
static inline void for_each_row(const EdgeSplit& split, EdgeCut from, EdgeCut to, F&& f) {
  for (RowCursor at(split, from, to); at.next();) f(at.row, at.begin, at.end, at.part);
}

// For every divided row: first(row, chunk of its tail), next(row, chunk of a head) in order, then last(row).
template <class First, class Next, class Last>
static inline void for_each_divided_row(const EdgeSplit& split, const EdgeCut* cuts, First&& first,
                                        Next&& next, Last&& last) {
  for (int64_t k = 1; k < split.chunks;) {
    const int64_t row = cuts[k].row;
    if (row == split.rows || cuts[k].edge == split.rowptr[row]) {
      ++k;
      continue;
    }
    first(row, k - 1);
    for (; k < split.chunks && cuts[k].row == row; ++k) next(row, k);
    last(row);
  }
}

}  // namespace fastattn
