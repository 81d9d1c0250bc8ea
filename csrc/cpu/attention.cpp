// Softmax attention on the CPU: forward, backward and attention weights, for every instruction set and dtype.
//
// One layout carries all of it: the lanes of a vector are query rows. A tile of kTile query rows is packed once,
// transposed, into a panel; then
//   scores^T [keys, rows]  = K [keys, D]   . Q^T panel      keys read in place, one scalar broadcast at a time
//   out^T    [Dv, rows]   += V^T [Dv, keys] . P^T            values likewise; P^T is the score buffer itself
// so that neither keys nor values are repacked in fp32, and the softmax (running maximum, sum, rescaling, bands,
// masks, dropout) is vertical arithmetic without a single horizontal reduction. The backward's five products have
// the same two forms. In the bf16 pair format values (and keys, for grad_query) are transposed once per key block
// and shared by the tiles of a task.
#include "attention.h"

#include <cstdlib>
#include <new>

#include "gemm.h"
#include "simd.h"

namespace fastattn::FASTATTN_ISA {
namespace {

constexpr int64_t kBlock = 128;  // keys per block: a 128 x 32 fp32 score tile is 16 KB, half of a small L1

FASTATTN_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
FASTATTN_INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
FASTATTN_INLINE int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
FASTATTN_INLINE int64_t round_down(int64_t a, int64_t b) { return a / b * b; }

// Scratch memory of one thread. Small arenas stay with the thread between calls; large ones are returned at once.
class Arena {
 public:
  ~Arena() { release(); }
  template <class E>
  E* take(int64_t count) {
    size_t bytes = size_t(round_up(count * int64_t(sizeof(E)), 64));
    if (used_ + bytes > capacity_) grow(bytes);
    char* p = base_ + used_;
    used_ += bytes;
    return reinterpret_cast<E*>(p);
  }
  template <class E>
  E* take_zero(int64_t count) {
    E* p = take<E>(count);
    std::memset(static_cast<void*>(p), 0, size_t(count) * sizeof(E));
    return p;
  }
  // Everything taken since construction of the scope goes back when it ends.
  struct Scope {
    Arena& arena;
    explicit Scope(Arena& a) : arena(a) {}
    ~Scope() { arena.reset(); }
  };

 private:
  static constexpr size_t kKeep = size_t(4) << 20;
  struct Block {
    Block* previous;
  };
  void grow(size_t bytes) {
    size_t capacity = 2 * capacity_ > bytes + 64 ? 2 * capacity_ : bytes + 64;
    if (capacity < (size_t(1) << 16)) capacity = size_t(1) << 16;
    if (capacity > 2 * kKeep) capacity = bytes + 64;
    void* memory = std::aligned_alloc(64, size_t(round_up(int64_t(capacity), 64)));
    if (!memory) throw std::bad_alloc();
    auto* block = static_cast<Block*>(memory);
    block->previous = last_;
    last_ = block;
    base_ = static_cast<char*>(memory);
    capacity_ = capacity;
    used_ = 64;
  }
  void reset() {
    if (last_ && (last_->previous || capacity_ > kKeep)) return release();
    used_ = last_ ? 64 : 0;
  }
  void release() {
    while (last_) {
      Block* previous = last_->previous;
      std::free(last_);
      last_ = previous;
    }
    base_ = nullptr;
    capacity_ = used_ = 0;
  }
  Block* last_ = nullptr;
  char* base_ = nullptr;
  size_t capacity_ = 0, used_ = 0;
};

Arena& thread_arena() {
  static thread_local Arena arena;
  return arena;
}

template <class T>
struct FormatOf {
  using type = Plain<float>;
};
template <>
struct FormatOf<double> {
  using type = Plain<double>;
};
#if defined(__AVX512BF16__)
template <>
struct FormatOf<bf16> {
  using type = Pair;
};
#endif
template <class X, class Y>
constexpr bool kSame = false;
template <class X>
constexpr bool kSame<X, X> = true;

template <int kBytes>
struct UnsignedOf {
  using type = uint32_t;
};
template <>
struct UnsignedOf<8> {
  using type = uint64_t;
};

FASTATTN_INLINE int64_t offset(const View& v, int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) {
  return i0 * v.stride[0] + i1 * v.stride[1] + i2 * v.stride[2] + i3 * v.stride[3];
}

template <class T>
struct Attention {
  using Format = typename FormatOf<T>::type;
  using A = typename Format::Accumulator;
  using E = typename Format::Element;
  using V = Vec<A>;
  using U = typename UnsignedOf<sizeof(A)>::type;
  static constexpr int N = kLanes<A>;
  static constexpr int NV = kColumns;
  static constexpr int kTile = N * NV;
  static constexpr bool kDirect = kSame<T, E>;  // operands can be read where they lie
  static constexpr bool kPairs = Format::kStep == 2;
  static constexpr A kInf = A(__builtin_inf());
  // Keys per tile are rounded to this: the depth of out^T += V^T P^T, and the rows of the scores.
  static constexpr int64_t kKeyStep = Format::kDepth > Format::kRows ? Format::kDepth : Format::kRows;

  // --- what the options amount to -------------------------------------------------------------------------------

  struct Problem {
    const AttentionParams& p;
    int64_t group, tiles_per_head, tiles;  // tiles of one key/value head, over all its query heads
    bool flat;                             // short queries: a tile takes rows of several heads
    int64_t depth, depth_v;                // D and Dv as padded for the products
    int64_t key_begin, key_end;            // keys inside some query's band
    bool masked;                           // some keys may be hidden by attn_mask or key_padding_mask
    bool general;                          // scores need more than a positive scale (then they are transformed first)
    U threshold;
    A keep_scale;

    explicit Problem(const AttentionParams& params) : p(params) {
      group = p.H / p.Hkv;
      flat = p.L < kTile;
      tiles_per_head = (p.L + kTile - 1) / kTile;
      tiles = flat ? (group * p.L + kTile - 1) / kTile : group * tiles_per_head;
      depth = round_up(p.D, Format::kDepth);
      depth_v = round_up(p.Dv, Format::kDepth);
      int64_t lo, hi;
      band(0, lo, hi);
      key_begin = lo;
      band(p.L - 1, lo, hi);
      key_end = hi;
      masked = p.mask.data || p.key_padding.data;
      general = masked || p.alibi.data || p.softcap > 0 || !(p.scale > 0);
      double limit = p.dropout_p * 4294967296.0 + 0.5;
      threshold = limit >= 4294967295.0 ? U(4294967295u) : U(limit);
      keep_scale = p.dropout_p < 1 ? A(1 / (1 - p.dropout_p)) : A(0);
    }
    // Keys [lo, hi) that the band leaves to query i; lo >= hi where it leaves none.
    void band(int64_t i, int64_t& lo, int64_t& hi) const {
      int64_t diagonal = i + p.offset;
      lo = p.window_left < 0 ? 0 : min(max(diagonal - p.window_left, 0), p.S);
      hi = p.window_right < 0 ? p.S : max(min(diagonal + min(p.window_right, p.S + p.L) + 1, p.S), 0);
    }
    bool has_dropout() const { return p.dropout_p > 0; }
  };

  static bool mask_shows(const AttentionParams& p, int64_t b, int64_t h, int64_t i, int64_t j) {
    if (p.key_padding.data && !static_cast<const uint8_t*>(p.key_padding.data)[offset(p.key_padding, b, j)]) return false;
    if (!p.mask.data) return true;
    int64_t at = offset(p.mask, b, h, i, j);
    if (p.mask.dtype == DType::boolean) return static_cast<const uint8_t*>(p.mask.data)[at];
    if (p.mask.dtype == DType::f32) return static_cast<const float*>(p.mask.data)[at] != -__builtin_inff();
    return to_float(static_cast<const T*>(p.mask.data)[at]) != -kInf;
  }
  // Whether query (b, h, i) sees any key: by the masks and the band, never by a score's value.
  static bool row_sees(const Problem& q, int64_t b, int64_t h, int64_t i) {
    int64_t lo, hi;
    q.band(i, lo, hi);
    if (lo >= hi || !q.masked) return lo < hi;
    for (int64_t j = lo; j < hi; ++j)
      if (mask_shows(q.p, b, h, i, j)) return true;
    return false;
  }
  // Whether any query that reads key head hk sees key j.
  static bool key_is_seen(const Problem& q, int64_t b, int64_t hk, int64_t j) {
    for (int64_t g = 0; g < q.group; ++g)
      for (int64_t i = 0; i < q.p.L; ++i) {
        int64_t lo, hi;
        q.band(i, lo, hi);
        if (j >= lo && j < hi && mask_shows(q.p, b, hk * q.group + g, i, j)) return true;
      }
    return false;
  }

  // --- tiles of query rows --------------------------------------------------------------------------------------

  struct Tile {
    int count;                     // rows in use; the lanes behind them repeat the last row's limits
    int64_t b;
    int64_t head[kTile], row[kTile];
    Int<A> lo[kTile], hi[kTile];   // visible band of each row
    int64_t lo_min, lo_max, hi_min, hi_max;
    bool seen[kTile];
    bool all_seen;                 // no lane is empty or behind the last row
    A slope[kTile], diagonal[kTile];
    U key1[kTile], key2[kTile];    // dropout: two words per row
  };

  static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  // Tile t of key/value head hk.
  static void make_tile(const Problem& q, int64_t b, int64_t hk, int64_t t, Tile& tile) {
    const AttentionParams& p = q.p;
    if (!q.flat) return make_tile_of_head(q, b, hk * q.group + t / q.tiles_per_head, t % q.tiles_per_head * kTile, tile);
    tile.count = int(min(kTile, q.group * p.L - t * kTile));
    for (int r = 0; r < kTile; ++r) {
      int64_t at = t * kTile + min(r, tile.count - 1);
      tile.head[r] = hk * q.group + at / p.L;
      tile.row[r] = at % p.L;
    }
    describe(q, b, tile);
  }
  // Rows [first, first + kTile) of one query head.
  static void make_tile_of_head(const Problem& q, int64_t b, int64_t h, int64_t first, Tile& tile) {
    tile.count = int(min(kTile, q.p.L - first));
    for (int r = 0; r < kTile; ++r) {
      tile.head[r] = h;
      tile.row[r] = first + min(r, tile.count - 1);
    }
    describe(q, b, tile);
  }
  static void describe(const Problem& q, int64_t b, Tile& tile) {
    const AttentionParams& p = q.p;
    tile.b = b;
    tile.lo_min = p.S, tile.lo_max = 0, tile.hi_min = p.S, tile.hi_max = 0;
    tile.all_seen = true;
    for (int r = 0; r < kTile; ++r) {
      const int64_t h = tile.head[r], i = tile.row[r];
      int64_t lo, hi;
      q.band(i, lo, hi);
      tile.lo[r] = Int<A>(lo);
      tile.hi[r] = Int<A>(hi);
      tile.lo_max = max(tile.lo_max, lo);
      tile.hi_min = min(tile.hi_min, hi);
      tile.seen[r] = r < tile.count && row_sees(q, b, h, i);
      tile.all_seen &= tile.seen[r];
      if (lo < hi) {
        tile.lo_min = min(tile.lo_min, lo);
        tile.hi_max = max(tile.hi_max, hi);
      }
      if (p.alibi.data) {
        tile.slope[r] = static_cast<const A*>(p.alibi.data)[offset(p.alibi, b, h)];
        tile.diagonal[r] = A(i + p.offset);
      }
      if (q.has_dropout()) {
        uint64_t z = mix(p.seed + uint64_t((b * p.H + h) * p.L + i + 1) * 0x9E3779B97F4A7C15u);
        tile.key1[r] = U(uint32_t(z));
        tile.key2[r] = U(uint32_t(z >> 32));
      }
    }
  }

  static V dropout_keep(const Problem& q, const Tile& tile, int v, int64_t j) {  // 1 / (1 - p) where kept, else 0
    using VU = Vec<U>;
    constexpr U kWord = U(0xffffffffu);
    VU x = (U(uint32_t(j) * 0x9E3779B9u) + load(tile.key1 + v * N)) & kWord;
    x ^= x >> 16;
    x = (x * U(0x85EBCA6Bu)) & kWord;
    x ^= load(tile.key2 + v * N);
    x ^= x >> 13;
    x = (x * U(0xC2B2AE35u)) & kWord;
    x ^= x >> 16;
    return x >= VU{} + q.threshold ? V{} + q.keep_scale : V{};
  }

  // --- packing ----------------------------------------------------------------------------------------------------

  // Panel [depth / step][kTile][step] of the tile's rows of a (B, H, L, X) tensor; rows that see nothing and padding
  // are zero.
  static void pack_transposed(const Tile& tile, const View& view, int64_t columns, int64_t depth, E* panel) {
    const T* data = static_cast<const T*>(view.data);
    const int64_t stride = view.stride[3];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      const T* row[N];
      for (int r = 0; r < N; ++r) {
        int s = v * N + r;
        row[r] = tile.seen[s] ? data + offset(view, tile.b, tile.head[s], tile.row[s]) : nullptr;
      }
      if constexpr (kPairs) {
        for (int64_t d = 0; d < depth; d += 2 * N) {
          Vec<float> block[N];
          for (int r = 0; r < N; ++r) {
            Vec<uint32_t> pairs = row[r] ? load_pairs(row[r] + d * stride, stride, columns - d) : Vec<uint32_t>{};
            block[r] = bit_cast<Vec<float>>(pairs);
          }
          transpose<float>(block);
          for (int i = 0; i < N && d + 2 * i < depth; ++i)
            store(reinterpret_cast<float*>(panel) + (d / 2 + i) * kTile + v * N, block[i]);
        }
      } else {
        for (int64_t d = 0; d < depth; d += N) {
          V block[N];
          if (tile.all_seen && stride == 1 && columns - d >= N)
#pragma GCC unroll 16
            for (int r = 0; r < N; ++r) block[r] = load_wide(row[r] + d);
          else
            for (int r = 0; r < N; ++r)
              block[r] = row[r] ? load_row<A>(row[r] + d * stride, stride, columns - d) : V{};
          transpose<A>(block);
          for (int i = 0; i < N && d + i < depth; ++i) store(panel + (d + i) * kTile + v * N, block[i]);
        }
      }
    }
  }
  // 2 N elements of a row as they lie; those from `count` on are zero.
  static FASTATTN_INLINE Vec<uint32_t> load_pairs(const bf16* p, int64_t stride, int64_t count) {
    if (stride == 1 && count >= 2 * kLanes<float>) {
      Vec<uint32_t> v;
      __builtin_memcpy(&v, p, sizeof v);
      return v;
    }
    bf16 buffer[2 * kLanes<float>];
    std::memset(buffer, 0, sizeof buffer);
    int64_t n = min(count, 2 * kLanes<float>);
    for (int64_t i = 0; i < n; ++i) buffer[i] = p[i * stride];
    Vec<uint32_t> v;
    __builtin_memcpy(&v, buffer, sizeof v);
    return v;
  }
  // Panel [kTile / step][columns][step] of the same rows, not transposed: the B operand of grad_key and grad_value.
  static void pack_rows(const Tile& tile, const View& view, int64_t columns, int64_t padded, E* panel) {
    const T* data = static_cast<const T*>(view.data);
    const int64_t stride = view.stride[3];
    auto row = [&](int r) -> const T* {
      return tile.seen[r] ? data + offset(view, tile.b, tile.head[r], tile.row[r]) : nullptr;
    };
    for (int r = 0; r < kTile; r += Format::kStep) {
      const T* first = row(r);
      if constexpr (kPairs) {
        const T* second = row(r + 1);
        for (int64_t d = 0; d < padded; d += 2 * N) {
          Vec<float> low, high;
          interleave(first, second, stride, d, columns, low, high);
          float* to = reinterpret_cast<float*>(panel) + (r / 2) * padded + d;
          store(to, low);
          if (d + N < padded) store(to + N, high);
        }
      } else {
        for (int64_t d = 0; d < padded; d += N)
          store(panel + r * padded + d, first ? load_row<A>(first + d * stride, stride, columns - d) : V{});
      }
    }
  }
  // Element pairs (first[d + i], second[d + i]) of two rows, for N columns in `low` and the next N in `high`; null rows
  // and columns from `columns` on are zero.
  static FASTATTN_INLINE void interleave(const bf16* first, const bf16* second, int64_t stride, int64_t d,
                                         int64_t columns, Vec<float>& low, Vec<float>& high) {
    typedef uint16_t Row __attribute__((vector_size(kVectorBytes)));
    auto row = [&](const bf16* p) {
      return p ? bit_cast<Row>(load_pairs(p + d * stride, stride, columns - d)) : Row{};
    };
    const Row a = row(first), b = row(second);
    zip(a, b, low, high, std::make_integer_sequence<int, 2 * N>{});
  }
  template <class Row, int... I>
  static FASTATTN_INLINE void zip(Row a, Row b, Vec<float>& low, Vec<float>& high, std::integer_sequence<int, I...>) {
    constexpr int n = sizeof...(I);
    low = bit_cast<Vec<float>>(__builtin_shufflevector(a, b, (I / 2 + (I & 1) * n)...));
    high = bit_cast<Vec<float>>(__builtin_shufflevector(a, b, (n / 2 + I / 2 + (I & 1) * n)...));
  }

  // --- blocks of keys -----------------------------------------------------------------------------------------------

  // [keys, X]: row k at data + k * ld.
  struct Straight {
    const E* data;
    int64_t ld;
  };
  // [X, keys] for Format::outputs: the straight operand itself, or a transposed copy where products take pairs of keys.
  struct Sideways {
    const E* data;
    int64_t ld;
    const E* at(int64_t row, int64_t key) const { return kPairs ? data + row * ld + key : data + row + key * ld; }
  };
  struct KeyBlock {
    int64_t begin, end;      // keys [begin, end); begin is a multiple of kBlock
    Straight key, value;
    Sideways key_t, value_t;
  };
  enum class Use { scores, forward, backward };  // which operands of a block are wanted
  struct KeyScratch {
    E *key, *value, *key_t, *value_t;
    void take(Arena& arena, const Problem& q, Use use) {
      const bool value_used = use == Use::backward || (use == Use::forward && !kPairs);
      key = arena.take<E>(kBlock * q.depth);
      value = value_used ? arena.take<E>(kBlock * q.depth_v) : nullptr;
      key_t = kPairs && use == Use::backward ? arena.take<E>(kBlock * round_up(q.p.D, Format::kRows)) : nullptr;
      value_t = kPairs && use == Use::forward ? arena.take<E>(kBlock * round_up(q.p.Dv, Format::kRows)) : nullptr;
    }
  };

  static bool row_is_finite(const T* row, int64_t stride, int64_t columns) {
    A sum = 0;  // x * 0 is 0 for finite x, NaN otherwise
    if (stride == 1) {
      V total{};
      int64_t d = 0;
      for (; d + N <= columns; d += N) total += load_wide(row + d) * A(0);
      sum = reduce_add<A>(total);
      row += d;
      columns -= d;
    }
    for (int64_t d = 0; d < columns; ++d) sum += A(to_float(row[d * stride])) * A(0);
    return sum == 0;
  }

  // Rows [begin, end) of a (B, Hkv, S, X) tensor as pointers: null for keys outside every band, and for keys that
  // hold NaN or inf while no query sees them (they must not reach 0 * NaN). Returns whether any row is null.
  static bool key_rows(const Problem& q, const View& view, int64_t columns, int64_t b, int64_t hk, int64_t begin,
                       int64_t end, const T** rows) {
    bool any = false;
    for (int64_t j = begin; j < end; ++j) {
      const T* row = nullptr;
      if (j >= q.key_begin && j < q.key_end) {
        row = static_cast<const T*>(view.data) + offset(view, b, hk, j);
        if (q.masked && !row_is_finite(row, view.stride[3], columns) && !key_is_seen(q, b, hk, j)) row = nullptr;
      }
      rows[j - begin] = row;
      // Plain clips tiles to the band exactly, so that keys outside it are not touched.
      any |= !row && (kPairs || (j >= q.key_begin && j < q.key_end));
    }
    return any;
  }

  // [keys, X] as the A operand: in place where it can be read as it lies, else copied and padded with zeros.
  static Straight straight(const View& view, const T* first, int64_t columns, int64_t padded, const T** rows,
                          int64_t count, bool has_null, E* scratch) {
    if constexpr (kDirect) {
      bool fits = count % kKeyStep == 0 && columns == padded && view.stride[3] == 1;
      if (fits && !has_null) return {first, view.stride[2]};
    }
    int64_t filled = round_up(count, kKeyStep);
    for (int64_t j = 0; j < filled; ++j) {
      const T* row = j < count ? rows[j] : nullptr;
      E* to = scratch + j * padded;
      if (!row) {
        std::memset(static_cast<void*>(to), 0, size_t(padded) * sizeof(E));
      } else if constexpr (kPairs) {
        for (int64_t d = 0; d < padded; d += 2 * N) {
          Vec<uint32_t> pairs = load_pairs(row + d * view.stride[3], view.stride[3], columns - d);
          __builtin_memcpy(to + d, &pairs, size_t(min(2 * N, padded - d)) * 2);
        }
      } else {
        int64_t d = 0;
        for (; d + N <= padded; d += N) store(to + d, load_row<A>(row + d * view.stride[3], view.stride[3], columns - d));
        for (; d < padded; ++d) to[d] = A(to_float(row[d * view.stride[3]]));
      }
    }
    return {scratch, padded};
  }
  static Sideways sideways(const View& view, int64_t columns, const T** rows, int64_t count, const Straight& straight,
                          E* scratch) {
    if constexpr (!kPairs) {
      return {straight.data, straight.ld};
    } else {
      const int64_t filled = round_up(columns, Format::kRows);
      for (int64_t j = 0; j < count; j += 2 * N)
        for (int64_t d = 0; d < filled; d += 2 * N) {
          Vec<float> low[N], high[N];  // pairs of columns [d, d + N) and [d + N, d + 2 N)
          for (int r = 0; r < N; ++r) {
            int64_t k = j + 2 * r;
            const T* first = k < count ? rows[k] : nullptr;
            const T* second = k + 1 < count ? rows[k + 1] : nullptr;
            interleave(first, second, view.stride[3], d, columns, low[r], high[r]);
          }
          transpose<float>(low);
          transpose<float>(high);
          float* to = reinterpret_cast<float*>(scratch + d * kBlock + j);
          const int64_t left = filled - d;
          for (int i = 0; i < N && i < left; ++i) store(to + i * (kBlock / 2), low[i]);
          for (int i = 0; i < N && N + i < left; ++i) store(to + (N + i) * (kBlock / 2), high[i]);
        }
      return {scratch, kBlock};
    }
  }

  static KeyBlock make_block(const Problem& q, int64_t b, int64_t hk, int64_t begin, int64_t end, Use use,
                             const KeyScratch& scratch) {
    const AttentionParams& p = q.p;
    const T* rows[kBlock];
    const int64_t count = end - begin;
    KeyBlock block{begin, end, {}, {}, {}, {}};
    bool null = key_rows(q, p.key, p.D, b, hk, begin, end, rows);
    const T* first = static_cast<const T*>(p.key.data) + offset(p.key, b, hk, begin);
    block.key = straight(p.key, first, p.D, q.depth, rows, count, null, scratch.key);
    if (use == Use::backward) block.key_t = sideways(p.key, p.D, rows, count, block.key, scratch.key_t);
    if (use == Use::scores) return block;
    null = key_rows(q, p.value, p.Dv, b, hk, begin, end, rows);
    first = static_cast<const T*>(p.value.data) + offset(p.value, b, hk, begin);
    if (scratch.value) block.value = straight(p.value, first, p.Dv, q.depth_v, rows, count, null, scratch.value);
    if (use == Use::forward) block.value_t = sideways(p.value, p.Dv, rows, count, block.value, scratch.value_t);
    return block;
  }

  // --- scores -------------------------------------------------------------------------------------------------------

  template <class M>
  static FASTATTN_INLINE V load_mask(const M* m, int64_t stride, int64_t count) {
    if constexpr (kSame<M, uint8_t>) {
      uint8_t buffer[N];
      if (stride == 1 && count >= N) {
        __builtin_memcpy(buffer, m, N);
      } else {
        for (int i = 0; i < N; ++i) buffer[i] = i < count ? m[i * stride] : 0;
      }
      typedef uint8_t Bytes __attribute__((vector_size(N)));
      Bytes bytes;
      __builtin_memcpy(&bytes, buffer, N);
      Vec<Int<A>> shown = __builtin_convertvector(bytes, Vec<Int<A>>);
      return shown != 0 ? V{} : V{} - kInf;
    } else if constexpr (sizeof(A) == 8 && sizeof(M) == 4) {
      V v{};
      for (int i = 0; i < N && i < count; ++i) v[i] = A(m[i * stride]);
      return v;
    } else {
      return load_row<A>(m, stride, count);
    }
  }

  static constexpr A kLargest = sizeof(A) == 8 ? A(0x1p1023) : A(0x1p127);
  // A mask value in log2 units. Only -inf hides: the most negative finite values must not become it.
  static FASTATTN_INLINE V to_log2(V mask) {
    V scaled = mask * A(kLog2e);
    scaled = (mask < -kLargest) & (mask != -kInf) ? V{} - kLargest : scaled;
    return scaled;
  }

  // Fills bias[key - begin][kTile] with the mask in log2 units (-inf = hidden). Returns bit 0: something is visible,
  // bit 1: something is hidden or biased.
  template <class M>
  static int fill_mask_tile(const Problem& q, const Tile& tile, int64_t begin, int64_t end, A* bias) {
    const AttentionParams& p = q.p;
    const View& mask = p.mask;
    const M* data = static_cast<const M*>(mask.data);
    const int64_t keys = end - begin;
    auto units = [](V m) { return kSame<M, uint8_t> ? m : to_log2(m); };
    if (!data) {
      for (int64_t x = 0; x < keys * kTile; x += N) store(bias + x, V{});
    } else if (mask.stride[2] == 0 && (!q.flat || mask.stride[1] == 0)) {
      const M* row = data + offset(mask, tile.b, tile.head[0], 0, begin);
      for (int64_t j = 0; j < keys; ++j) {
        V value = V{} + units(load_mask<M>(row + j * mask.stride[3], 1, 1))[0];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) store(bias + j * kTile + v * N, value);
      }
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const M* row[N];
        for (int r = 0; r < N; ++r)
          row[r] = data + offset(mask, tile.b, tile.head[v * N + r], tile.row[v * N + r], begin);
        for (int64_t j = 0; j < keys; j += N) {
          V block[N];
          for (int r = 0; r < N; ++r) block[r] = units(load_mask<M>(row[r] + j * mask.stride[3], mask.stride[3], keys - j));
          transpose<A>(block);
          for (int i = 0; i < N && j + i < keys; ++i) store(bias + (j + i) * kTile + v * N, block[i]);
        }
      }
    }
    if (p.key_padding.data) {
      const uint8_t* shown = static_cast<const uint8_t*>(p.key_padding.data);
      for (int64_t j = 0; j < keys; ++j)
        if (!shown[offset(p.key_padding, tile.b, begin + j)])
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) store(bias + j * kTile + v * N, V{} - kInf);
    }
    Vec<Int<A>> visible{}, altered{};
    for (int64_t x = 0; x < keys * kTile; x += N) {
      V value = load(bias + x);
      visible |= value != -kInf;
      altered |= value != 0;
    }
    return int(any(visible)) | int(any(altered)) << 1;
  }
  static int mask_tile(const Problem& q, const Tile& tile, int64_t begin, int64_t end, A* bias) {
    if (q.p.mask.dtype == DType::boolean || !q.p.mask.data) return fill_mask_tile<uint8_t>(q, tile, begin, end, bias);
    if (q.p.mask.dtype == DType::f32) return fill_mask_tile<float>(q, tile, begin, end, bias);
    return fill_mask_tile<T>(q, tile, begin, end, bias);
  }

  // The part of a block that a tile visits: [begin, end) rounded to what the products need, relative to the block.
  struct Span {
    int64_t begin, end;
  };
  static Span span_of(const KeyBlock& block, const Tile& tile) {
    int64_t begin = max(block.begin, tile.lo_min), end = min(block.end, tile.hi_max);
    if (begin >= end) return {0, 0};
    return {round_down(begin - block.begin, kKeyStep), round_up(end - block.begin, kKeyStep)};
  }

  // Scores of one tile and key block on their way: scores[key - block.begin][kTile] for the keys of the span.
  struct Scores {
    A *scores, *bias;
    Span span;
    int64_t block_begin;
    int64_t begin, end;  // keys of the span that exist
    int content;         // what mask_tile says
    A factor;            // the score in log2 units is scores * factor

    void take(Arena& arena, const Problem& q) {
      scores = arena.take<A>(kBlock * kTile);
      bias = q.masked ? arena.take<A>(kBlock * kTile) : nullptr;
    }
    // False where the tile sees nothing of the block.
    bool start(const Problem& q, const Tile& tile, const KeyBlock& block) {
      span = span_of(block, tile);
      if (span.begin >= span.end) return false;
      block_begin = block.begin;
      begin = block.begin + span.begin;
      end = min(block.begin + span.end, block.end);
      content = q.masked ? mask_tile(q, tile, begin, end, bias) : 1;
      return content & 1;
    }
    // The products of keys [from, to) of the block.
    void multiply(const Problem& q, const E* query_panel, const KeyBlock& block, int64_t from, int64_t to) {
      Format::scores(to - from, q.depth, block.key.data + from * block.key.ld, block.key.ld, query_panel, scores + from * kTile);
    }
    // From q.k to log2 units (up to `factor`) with hidden scores at -inf. `bend` receives d(capped score) /
    // d(scaled score) where there is a softcap.
    void transform(const Problem& q, const Tile& tile, A* bend) {
      const AttentionParams& p = q.p;
      A* rows = scores + span.begin * kTile;
      const int64_t keys = span.end - span.begin;
      factor = A(p.scale * kLog2e);
      if (q.general) {
        const A scale = A(p.scale), cap = A(p.softcap), inverse_cap = cap > 0 ? A(1) / cap : A(0);
        for (int64_t j = 0; j < end - begin; ++j)
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) {
            A* at = rows + j * kTile + v * N;
            V s = load(at) * scale;
            if (cap > 0) {
              V t = tanh(s * inverse_cap);
              s = t * cap;
              if (bend) store(bend + (span.begin + j) * kTile + v * N, A(1) - t * t);
            }
            s *= A(kLog2e);
            if (p.alibi.data) {
              V distance = load(tile.diagonal + v * N) - A(begin + j);
              distance = distance < 0 ? -distance : distance;
              s -= load(tile.slope + v * N) * distance * A(kLog2e);
            }
            if (content & 2) {
              V m = load(bias + j * kTile + v * N);
              s = m == -kInf ? m : s + m;
            }
            store(at, s);
          }
        if (bend)  // dS is 0 in the rows behind the last key; so must be what it is multiplied with
          for (int64_t x = (end - block_begin) * kTile; x < span.end * kTile; x += N) store(bend + x, V{});
        factor = 1;
      }
      // Keys that some lane's band does not include.
      using VI = Vec<Int<A>>;
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t key = begin + j;
        if (key >= tile.lo_max && key < tile.hi_min) {
          j = min(keys, tile.hi_min - begin) - 1;
          continue;
        }
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          A* at = rows + j * kTile + v * N;
          VI position = VI{} + Int<A>(key);
          VI shown = (position >= load(tile.lo + v * N)) & (position < load(tile.hi + v * N));
          store(at, shown ? load(at) : V{} - kInf);
        }
      }
    }
  };
  static bool score_tile(const Problem& q, const Tile& tile, const E* query_panel, const KeyBlock& block, Scores& s,
                         A* bend) {
    if (!s.start(q, tile, block)) return false;
    s.multiply(q, query_panel, block, s.span.begin, s.span.end);
    s.transform(q, tile, bend);
    return true;
  }

  // --- forward ------------------------------------------------------------------------------------------------------

  // Of one tile. Weights are 2^(score - reference). The reference is an integer, so that rescaling is exact; it is the
  // rounded-up maximum of the first block and moves only when a later score exceeds it by more than kHeadroom (a
  // weight of 2^16 costs no precision), so that the maximum is found in the same pass that forms the weights.
  struct State {
    V reference[NV], sum[NV];
    bool started;  // the reference comes from scores
    bool coarse;   // references are small enough for exp2_coarse
    A* out;        // out^T [Dv][kTile]
  };
  static constexpr A kHeadroom = 16;
  // What one block adds to a state.
  struct Added {
    V sum[NV], top[NV];
    FASTATTN_INLINE void clear() {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[v] = V{}, top[v] = V{} - kInf;
    }
  };

  static FASTATTN_INLINE V finite_or_zero(V m) { return m == -kInf ? V{} : m; }

  // Two rows of P^T as pairs along the keys: lane q holds (p0[q], p1[q]).
  static FASTATTN_INLINE void store_pair(E* to, V p0, V p1) {
#if defined(__AVX512BF16__)
    if constexpr (kPairs) {
      alignas(64) static constexpr auto kOrder = [] {
        struct {
          uint16_t at[32];
        } order{};
        for (int i = 0; i < 16; ++i) order.at[2 * i] = uint16_t(i), order.at[2 * i + 1] = uint16_t(16 + i);
        return order;
      }();
      __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)p1, (__m512)p0);
      both = _mm512_permutexvar_epi16(_mm512_load_si512(&kOrder), both);
      _mm512_storeu_si512(to, both);
    }
#endif
  }

  // Moves the reference to cover the scores of the span and rescales what has been summed.
  static void raise_reference(const Problem& q, const Scores& s, State& state) {
    V top[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) top[v] = V{} - kInf;
    for (int64_t j = s.span.begin; j < s.span.end; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) top[v] = maximum(top[v], load(s.scores + j * kTile + v * N));
    for (int v = 0; v < NV; ++v) {
      V reference = maximum(state.reference[v], ceil(top[v] * s.factor));
      if (state.started && any(reference != state.reference[v])) {
        V alpha = exp2<>(state.reference[v] - finite_or_zero(reference));
        state.sum[v] *= alpha;
        for (int64_t d = 0; d < q.p.Dv; ++d) {
          A* at = state.out + d * kTile + v * N;
          store(at, load(at) * alpha);
        }
      }
      state.reference[v] = reference;
    }
    state.started = true;
    set_coarse(state);
  }
  static void set_coarse(State& state) {
    state.coarse = kPairs;
    if constexpr (kPairs)
      for (int v = 0; v < NV; ++v) {
        V reference = finite_or_zero(state.reference[v]);
        state.coarse &= !any((reference > A(1 << 20)) | (reference < A(-(1 << 20))));
      }
  }

  // P^T of keys [from, to) of the span: into `weights` as pairs, or over the scores.
  template <bool kCoarse>
  static void weigh(const Problem& q, const Tile& tile, const Scores& s, int64_t from, int64_t to, E* weights,
                    const State& state, Added& added) {
    V shift[NV], sum[NV], top[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v)
      shift[v] = finite_or_zero(state.reference[v]), sum[v] = added.sum[v], top[v] = added.top[v];
    const bool dropout = q.has_dropout();
    const A factor = s.factor;
    constexpr int kUnroll = kPairs ? 2 : 1;
    for (int64_t j = from; j < to; j += kUnroll) {
      V p[kUnroll][NV];
#pragma GCC unroll 2
      for (int u = 0; u < kUnroll; ++u)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          V score = load(s.scores + (j + u) * kTile + v * N);
          top[v] = maximum(top[v], score);
          if constexpr (kCoarse)
            p[u][v] = exp2_coarse(score, factor, shift[v]);
          else
            p[u][v] = exp2<>(score * factor - shift[v]);
          sum[v] += p[u][v];
        }
      if (dropout)
#pragma GCC unroll 2
        for (int u = 0; u < kUnroll; ++u)
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) p[u][v] *= dropout_keep(q, tile, v, s.block_begin + j + u);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        if constexpr (kPairs)
          store_pair(weights + j * kTile + v * 2 * N, p[0][v], p[1][v]);
        else
          store(s.scores + j * kTile + v * N, p[0][v]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) added.sum[v] = sum[v], added.top[v] = top[v];
  }
  static void weigh(const Problem& q, const Tile& tile, const Scores& s, int64_t from, int64_t to, E* weights,
                    const State& state, Added& added) {
    if constexpr (kPairs)
      if (state.coarse) return weigh<true>(q, tile, s, from, to, weights, state, added);
    weigh<false>(q, tile, s, from, to, weights, state, added);
  }
  // Takes over what a block added; false where a score went beyond the headroom and the block must be weighed again.
  static bool accept(const Scores& s, State& state, const Added& added) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v)
      if (any(added.top[v] * s.factor > state.reference[v] + kHeadroom)) return false;
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) state.sum[v] += added.sum[v];
    return true;
  }
  // The whole span of a block whose scores stand, after its reference has been raised.
  static void weigh_again(const Problem& q, const Tile& tile, const Scores& s, E* weights, State& state) {
    raise_reference(q, s, state);
    Added added;
    added.clear();
    weigh(q, tile, s, s.span.begin, s.span.end, weights, state, added);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) state.sum[v] += added.sum[v];
  }

  // Rows [from, to) of out^T += V^T P^T.
  static void add_values(const KeyBlock& block, Span span, const E* weights, int64_t from, int64_t to, A* out) {
    Format::outputs(to - from, span.end - span.begin, block.value_t.at(from, span.begin), block.value_t.ld,
                    weights + span.begin * kTile, out + from * kTile);
  }

  static A sink(const AttentionParams& p, int64_t h) {  // log2 units
    int64_t at = h * p.sinks.stride[0];
    if (p.sinks.dtype == DType::f32) return A(static_cast<const float*>(p.sinks.data)[at]) * A(kLog2e);
    return A(to_float(static_cast<const T*>(p.sinks.data)[at])) * A(kLog2e);
  }

  static void start_state(const Problem& q, const Tile& tile, bool with_sink, State& state) {
    state.started = q.p.sinks.data && with_sink;
    for (int v = 0; v < NV; ++v) {
      state.reference[v] = V{} - kInf;
      state.sum[v] = V{};
      if (q.p.sinks.data && with_sink) {
        V level;
        for (int i = 0; i < N; ++i) level[i] = sink(q.p, tile.head[v * N + i]);
        state.reference[v] = ceil(level);
        state.sum[v] = exp2<>(level - finite_or_zero(state.reference[v]));
      }
    }
    set_coarse(state);
  }

  // ln(2) (reference + log2(sum)). A mask value too large for log2 units has been cut off at kLargest; its log-sum-exp
  // is the most negative finite number.
  static FASTATTN_INLINE V natural_lse(V reference, V sum) {
    constexpr A kLowest = sizeof(A) == 8 ? A(-__DBL_MAX__) : A(-__FLT_MAX__);
    V lse = (reference + log2<A>(sum)) * A(kLn2);
    lse = (reference <= -kLargest) & (reference != -kInf) ? V{} + kLowest : lse;
    return sum == 0 ? V{} - kInf : lse;
  }

  // Writes the rows of a finished tile: out = out^T / sum, lse = ln(2) (reference + log2(sum)).
  static void finish_tile(const Problem& q, const Tile& tile, State& state) {
    const AttentionParams& p = q.p;
    V inverse[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      inverse[v] = A(1) / state.sum[v];
      if (!tile.all_seen)
        for (int i = 0; i < N; ++i)
          if (!tile.seen[v * N + i]) inverse[v][i] = 0;
    }
    T* out = static_cast<T*>(p.out.data);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v)
      for (int64_t d = 0; d < p.Dv; d += N) {
        V block[N];
        if (d + N <= p.Dv)
#pragma GCC unroll 16
          for (int i = 0; i < N; ++i) block[i] = load(state.out + (d + i) * kTile + v * N) * inverse[v];
        else
          for (int i = 0; i < N; ++i)
            block[i] = d + i < p.Dv ? load(state.out + (d + i) * kTile + v * N) * inverse[v] : V{};
        transpose<A>(block);
        if (tile.all_seen && d + N <= p.Dv) {
#pragma GCC unroll 16
          for (int i = 0; i < N; ++i)
            round_store(out + offset(p.out, tile.b, tile.head[v * N + i], tile.row[v * N + i], d), block[i]);
          continue;
        }
        for (int i = 0; i < N; ++i) {
          int r = v * N + i;
          if (r >= tile.count) break;
          T* row = out + offset(p.out, tile.b, tile.head[r], tile.row[r]);
          store_row<A>(row + d, 1, p.Dv - d, tile.seen[r] ? block[i] : V{});
        }
      }
    A* lse = static_cast<A*>(p.lse.data);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      const V level = natural_lse(state.reference[v], state.sum[v]);
      for (int i = 0; i < N && v * N + i < tile.count; ++i)
        lse[(tile.b * p.H + tile.head[v * N + i]) * p.L + tile.row[v * N + i]] = level[i];
    }
  }

  // The tiles of a task against one key block. Matrix tiles work beside the vector units, if instructions of both are
  // in flight together: the scores of the next tile and the output of the last one are then interleaved with the
  // exponentials of this one. 16 keys at a time: a chunk's instructions fit in the reorder buffer.
  class Pipeline {
    static constexpr int64_t kChunk = 16;

   public:
    Pipeline(const Problem& q, Arena& arena) {
      for (int i = 0; i < (Format::kBesideVectors ? 2 : 1); ++i) {
        scores_[i].take(arena, q);
        weights_[i] = kPairs ? arena.take<E>(kBlock * kTile) : nullptr;
      }
    }
    void run(const Problem& q, const Tile* tiles, State* states, const E* panels, int64_t count, const KeyBlock& block) {
      const int64_t panel = q.depth * kTile, rows_v = round_up(q.p.Dv, Format::kRows);
      [[maybe_unused]] const int64_t rows_per_chunk = round_up((rows_v * kChunk + kBlock - 1) / kBlock, Format::kRows);
      if constexpr (!Format::kBesideVectors) {
        Scores& s = scores_[0];
        for (int64_t t = 0; t < count; ++t) {
          const E* panel_t = panels + t * panel;
          if (!score_tile(q, tiles[t], panel_t, block, s, nullptr)) continue;
          if (!states[t].started) raise_reference(q, s, states[t]);
          Added added;
          added.clear();
          weigh(q, tiles[t], s, s.span.begin, s.span.end, weights_[0], states[t], added);
          if (!accept(s, states[t], added)) {
            if constexpr (!kPairs) score_tile(q, tiles[t], panel_t, block, s, nullptr);  // weights lie over the scores
            weigh_again(q, tiles[t], s, weights_[0], states[t]);
          }
          if constexpr (kPairs)
            add_values(block, s.span, weights_[0], 0, rows_v, states[t].out);
          else
            add_values(block, s.span, s.scores, 0, rows_v, states[t].out);
        }
      } else {
        bool live[3] = {false, false, false};  // of the next, this and the last tile
        Span last{};
        for (int64_t t = -1; t <= count; ++t) {
          Scores &next = scores_[(t + 1) & 1], &now = scores_[t & 1];
          Added added;
          added.clear();
          live[0] = t + 1 < count && next.start(q, tiles[t + 1], block);
          if (live[1]) {
            now.transform(q, tiles[t], nullptr);
            if (!states[t].started) raise_reference(q, now, states[t]);
          }
          int64_t row = 0;
          for (int64_t from = 0; from < kBlock; from += kChunk) {
            if (live[0] && from >= next.span.begin && from < next.span.end)
              next.multiply(q, panels + (t + 1) * panel, block, from, from + kChunk);
            if (live[1] && from >= now.span.begin && from < now.span.end)
              weigh(q, tiles[t], now, from, from + kChunk, weights_[t & 1], states[t], added);
            if (live[2] && row < rows_v) {
              int64_t to = from + kChunk == kBlock ? rows_v : min(rows_v, row + rows_per_chunk);
              add_values(block, last, weights_[(t - 1) & 1], row, to, states[t - 1].out);
              row = to;
            }
          }
          if (live[1]) {
            if (!accept(now, states[t], added)) weigh_again(q, tiles[t], now, weights_[t & 1], states[t]);
            last = now.span;
          }
          live[2] = live[1];
          live[1] = live[0];
        }
      }
    }

   private:
    Scores scores_[2];
    E* weights_[2];
  };

  static int64_t tiles_per_task(const Problem& q, int threads, int64_t panel) {
    // Enough tasks that uneven ones balance, few enough that a packed key block is shared; panels stay in L2.
    int64_t all = q.p.B * q.p.Hkv * q.tiles;
    int64_t fit = max(1, (512 << 10) / (panel * kTile * int64_t(sizeof(A))));
    return max(1, min(min(8, fit), all / (int64_t(threads) * 6)));
  }
  // Keys are split over tasks when there are few tiles (decoding). A function of the shape alone, so that results
  // do not depend on the number of threads.
  static int64_t key_splits(const Problem& q) {
    int64_t tiles = q.p.B * q.p.Hkv * q.tiles, keys = q.key_end - q.key_begin;
    return max(1, min(64 / max(tiles, 1), keys / 512));
  }

  // --- few query rows -----------------------------------------------------------------------------------------------
  //
  // Decoding reads every key and value once for a handful of query rows, so the lanes of a tile would stay empty.
  // Here lanes are columns in the products and keys in the softmax, and the rows of a group share each row loaded.

  static constexpr int64_t kFewRows = 8;
  static constexpr int64_t kAhead = 16;  // rows to prefetch ahead: each is read once, from memory
  static bool has_few_rows(const Problem& q) { return q.group * q.p.L <= kFewRows && !q.has_dropout(); }

  struct Few {
    Tile tile;
    A reference[kFewRows], sum[kFewRows];
    int64_t columns, columns_v;  // D and Dv as padded
    A *query, *out;              // [rows][columns], [rows][columns_v]
    A* scores;                   // [rows][kBlock]
    A *key, *value;              // rows that cannot be read as they lie, converted
  };
  static int64_t few_size(const Problem& q) { return 2 + round_up(q.p.Dv, N); }  // of one row's partial result

  static void take_few(const Problem& q, int64_t b, int64_t hk, Arena& arena, Few& f) {
    make_tile(q, b, hk, 0, f.tile);
    f.columns = round_up(q.p.D, N);
    f.columns_v = round_up(q.p.Dv, N);
    f.query = arena.take<A>(f.tile.count * f.columns);
    f.out = arena.take_zero<A>(f.tile.count * f.columns_v);
    f.scores = arena.take<A>(f.tile.count * kBlock);
    f.key = arena.take<A>(kBlock * f.columns);
    f.value = arena.take<A>(kBlock * f.columns_v);
    const View& view = q.p.query;
    for (int r = 0; r < f.tile.count; ++r) {
      const T* row = static_cast<const T*>(view.data) + offset(view, b, f.tile.head[r], f.tile.row[r]);
      for (int64_t d = 0; d < f.columns; d += N)
        store(f.query + r * f.columns + d,
              f.tile.seen[r] ? load_row<A>(row + d * view.stride[3], view.stride[3], q.p.D - d) : V{});
    }
  }

  // Calls f(rows, stride) with keys [begin, end) of one head as rows `padded` long, where they lie or converted.
  template <class F>
  static FASTATTN_INLINE void with_rows(const Problem& q, const View& view, int64_t columns, int64_t b, int64_t hk,
                                        int64_t begin, int64_t end, int64_t padded, A* scratch, F&& f) {
    const T* rows[kBlock];
    const bool null = key_rows(q, view, columns, b, hk, begin, end, rows);
    if (!null && view.stride[3] == 1 && columns == padded) return f(rows[0], view.stride[2]);
    for (int64_t j = 0; j < end - begin; ++j)
      for (int64_t d = 0; d < padded; d += N)
        store(scratch + j * padded + d,
              rows[j] ? load_row<A>(rows[j] + d * view.stride[3], view.stride[3], columns - d) : V{});
    f(static_cast<const A*>(scratch), padded);
  }

  // Sums the lanes of N vectors: lane i of the result is the sum of rows[i].
  template <int kStep>
  static FASTATTN_INLINE V reduce_rows(V (&rows)[N]) {
#pragma GCC unroll 16
    for (int i = 0; i < kStep; ++i) {
      exchange<kStep>(rows[i], rows[i + kStep], std::make_integer_sequence<int, N>{});
      rows[i] += rows[i + kStep];
    }
    if constexpr (kStep > 1)
      return reduce_rows<kStep / 2>(rows);
    else
      return rows[0];
  }

  template <class M>
  static FASTATTN_INLINE V mask_row(const AttentionParams& p, const Tile& tile, int r, int64_t key, int64_t count) {
    const View& mask = p.mask;
    const M* row = static_cast<const M*>(mask.data) + offset(mask, tile.b, tile.head[r], tile.row[r], key);
    return load_mask<M>(row, mask.stride[3], count);
  }
  // What hides or biases keys [key, key + N) from row r, in log2 units.
  static FASTATTN_INLINE V mask_row(const Problem& q, const Tile& tile, int r, int64_t key, int64_t count) {
    const AttentionParams& p = q.p;
    V bias{};
    if (p.mask.data) {
      if (p.mask.dtype == DType::boolean)
        bias = mask_row<uint8_t>(p, tile, r, key, count);
      else if (p.mask.dtype == DType::f32)
        bias = to_log2(mask_row<float>(p, tile, r, key, count));
      else
        bias = to_log2(mask_row<T>(p, tile, r, key, count));
    }
    if (p.key_padding.data) {
      V shown = load_mask<uint8_t>(static_cast<const uint8_t*>(p.key_padding.data) + offset(p.key_padding, tile.b, key),
                                   p.key_padding.stride[1], count);
      bias = shown == -kInf ? shown : bias;
    }
    return bias;
  }

  // scores[R rows][keys] = query . key: R rows and N / R keys at a time, so that their N sums are reduced together.
  template <int R, class Row>
  static void few_products(const A* query, int64_t columns, const Row* key, int64_t stride, int64_t keys, A* scores) {
    constexpr int K = N / R;
    for (int64_t j = 0; j < keys; j += K) {
      const Row* row[K];
      for (int k = 0; k < K; ++k) row[k] = key + min(j + k, keys - 1) * stride;
      V acc[N];
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) acc[i] = V{};
      for (int64_t d = 0; d < columns; d += N) {
        V x[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) x[r] = load(query + r * columns + d);
#pragma GCC unroll 16
        for (int k = 0; k < K; ++k) {
          V y = load_wide(row[k] + d);
          __builtin_prefetch(row[k] + kAhead * stride + d);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) acc[r * K + k] += x[r] * y;
        }
      }
      const V sums = reduce_rows<N / 2>(acc);
      for (int r = 0; r < R; ++r) std::memcpy(scores + r * kBlock + j, reinterpret_cast<const A*>(&sums) + r * K, K * sizeof(A));
    }
  }
  template <class Row>
  static void few_products(const Few& f, const Row* key, int64_t stride, int64_t keys) {
    int r = 0;
    const int rows = f.tile.count;
    if constexpr (N >= 4)
      for (; r + 4 <= rows; r += 4)
        few_products<4>(f.query + r * f.columns, f.columns, key, stride, keys, f.scores + r * kBlock);
    for (; r + 2 <= rows; r += 2)
      few_products<2>(f.query + r * f.columns, f.columns, key, stride, keys, f.scores + r * kBlock);
    if (r < rows) few_products<1>(f.query + r * f.columns, f.columns, key, stride, keys, f.scores + r * kBlock);
  }

  // From q.k to log2 units with hidden scores, and those behind the last key, at -inf.
  static void few_transform(const Problem& q, Few& f, int64_t begin, int64_t keys) {
    const AttentionParams& p = q.p;
    using VI = Vec<Int<A>>;
    VI lane;
    for (int i = 0; i < N; ++i) lane[i] = i;
    for (int r = 0; r < f.tile.count; ++r)
      for (int64_t j = 0; j < keys; j += N) {
        V s = load(f.scores + r * kBlock + j) * A(p.scale);
        if (p.softcap > 0) s = tanh(s * A(1 / p.softcap)) * A(p.softcap);
        s *= A(kLog2e);
        VI position = lane + Int<A>(begin + j);
        if (p.alibi.data) {
          V distance = f.tile.diagonal[r] - __builtin_convertvector(position, V);
          s -= (distance < 0 ? -distance : distance) * (f.tile.slope[r] * A(kLog2e));
        }
        if (q.masked) {
          V bias = mask_row(q, f.tile, r, begin + j, keys - j);
          s = bias == -kInf ? bias : s + bias;
        }
        VI shown = (position >= f.tile.lo[r]) & (position < f.tile.hi[r]) & (position < Int<A>(begin + keys));
        store(f.scores + r * kBlock + j, shown ? s : V{} - kInf);
      }
  }

  // out[rows][columns_v] += weights[rows][keys] value[keys][columns_v], R rows and C vectors at a time.
  template <int R, int C, class Row>
  static FASTATTN_INLINE void few_values(const A* weights, const Row* value, int64_t stride, int64_t keys, A* out,
                                         int64_t out_stride) {
    V acc[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r][c] = load(out + r * out_stride + c * N);
    for (int64_t j = 0; j < keys; ++j) {
      V x[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        x[c] = load_wide(value + j * stride + c * N);
        __builtin_prefetch(value + (j + kAhead) * stride + c * N);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] += weights[r * kBlock + j] * x[c];
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) store(out + r * out_stride + c * N, acc[r][c]);
  }
  template <int R, class Row>
  static void few_values(const Few& f, int first, const Row* value, int64_t stride, int64_t keys) {
    const A* weights = f.scores + first * kBlock;
    A* out = f.out + first * f.columns_v;
    int64_t d = 0;
    for (; d + 4 * N <= f.columns_v; d += 4 * N)
      few_values<R, 4>(weights, value + d, stride, keys, out + d, f.columns_v);
    for (; d + 2 * N <= f.columns_v; d += 2 * N)
      few_values<R, 2>(weights, value + d, stride, keys, out + d, f.columns_v);
    if (d < f.columns_v) few_values<R, 1>(weights, value + d, stride, keys, out + d, f.columns_v);
  }

  static void few_block(const Problem& q, Few& f, int64_t hk, int64_t begin, int64_t end) {
    const int64_t keys = end - begin;
    with_rows(q, q.p.key, q.p.D, f.tile.b, hk, begin, end, f.columns, f.key,
              [&](auto* key, int64_t stride) { few_products(f, key, stride, keys); });
    few_transform(q, f, begin, keys);
    for (int r = 0; r < f.tile.count; ++r) {
      A* row = f.scores + r * kBlock;
      V top = V{} - kInf;
      for (int64_t j = 0; j < keys; j += N) top = maximum(top, load(row + j));
      A highest = top[0];
      for (int i = 1; i < N; ++i) highest = top[i] > highest || top[i] != top[i] ? top[i] : highest;
      V reference = maximum(V{} + f.reference[r], ceil(V{} + highest));
      if (reference[0] != f.reference[r]) {
        V alpha = exp2<>(V{} + f.reference[r] - finite_or_zero(reference));
        f.sum[r] *= alpha[0];
        for (int64_t d = 0; d < f.columns_v; d += N)
          store(f.out + r * f.columns_v + d, load(f.out + r * f.columns_v + d) * alpha);
        f.reference[r] = reference[0];
      }
      const V shift = finite_or_zero(reference);
      V sum{};
      for (int64_t j = 0; j < keys; j += N) {
        V weight = exp2<>(load(row + j) - shift);
        sum += weight;
        store(row + j, weight);
      }
      f.sum[r] += reduce_add<A>(sum);
    }
    with_rows(q, q.p.value, q.p.Dv, f.tile.b, hk, begin, end, f.columns_v, f.value, [&](auto* value, int64_t stride) {
      int r = 0;
      for (; r + 4 <= f.tile.count; r += 4) few_values<4>(f, r, value, stride, keys);
      switch (f.tile.count - r) {
        case 3: few_values<3>(f, r, value, stride, keys); break;
        case 2: few_values<2>(f, r, value, stride, keys); break;
        case 1: few_values<1>(f, r, value, stride, keys); break;
        default: break;
      }
    });
  }

  static void finish_few(const Problem& q, const Few& f) {
    const AttentionParams& p = q.p;
    for (int r = 0; r < f.tile.count; ++r) {
      const A inverse = f.tile.seen[r] ? A(1) / f.sum[r] : A(0);
      T* out = static_cast<T*>(p.out.data) + offset(p.out, f.tile.b, f.tile.head[r], f.tile.row[r]);
      for (int64_t d = 0; d < p.Dv; d += N)
        store_row<A>(out + d, 1, p.Dv - d, f.tile.seen[r] ? load(f.out + r * f.columns_v + d) * inverse : V{});
      static_cast<A*>(p.lse.data)[(f.tile.b * p.H + f.tile.head[r]) * p.L + f.tile.row[r]] =
          natural_lse(V{} + f.reference[r], V{} + f.sum[r])[0];
    }
  }

  static void forward_few(const Problem& q, const Parallel& parallel) {
    const AttentionParams& p = q.p;
    const int64_t heads = p.B * p.Hkv, rows = q.group * p.L, size = few_size(q);
    const int64_t keys = max(q.key_end - q.key_begin, 0);
    // A function of the shape alone, so that results do not depend on the number of threads.
    const int64_t splits = max(1, min(128 / heads, keys / 512));
    const int64_t per_split = round_up((keys + splits - 1) / splits, kBlock);
    A* partial = splits > 1 ? static_cast<A*>(std::malloc(size_t(heads * splits * rows * size) * sizeof(A))) : nullptr;
    if (splits > 1 && !partial) throw std::bad_alloc();
    for_each_task(parallel, heads * splits, [&](int64_t task, int) {
      Arena& arena = thread_arena();
      Arena::Scope scope(arena);
      const int64_t split = task % splits, head = task / splits, b = head / p.Hkv, hk = head % p.Hkv;
      Few& f = *arena.take<Few>(1);
      take_few(q, b, hk, arena, f);
      for (int r = 0; r < rows; ++r) {
        const A level = p.sinks.data && split == 0 ? sink(p, f.tile.head[r]) : -kInf;
        V reference = ceil(V{} + level);
        f.reference[r] = reference[0];
        f.sum[r] = exp2<>(level - finite_or_zero(reference))[0];
      }
      const int64_t first = max(f.tile.lo_min, q.key_begin + split * per_split);
      const int64_t last = min(f.tile.hi_max, splits > 1 ? q.key_begin + (split + 1) * per_split : p.S);
      for (int64_t begin = first; begin < last; begin += kBlock)
        few_block(q, f, hk, begin, min(begin + kBlock, last));
      if (splits == 1) return finish_few(q, f);
      for (int r = 0; r < rows; ++r) {
        A* to = partial + ((head * splits + split) * rows + r) * size;
        to[0] = f.reference[r];
        to[1] = f.sum[r];
        std::memcpy(to + 2, f.out + r * f.columns_v, size_t(f.columns_v) * sizeof(A));
      }
    });
    if (splits == 1) return;
    for_each_task(parallel, heads, [&](int64_t head, int) {  // merge in order of the splits
      Arena& arena = thread_arena();
      Arena::Scope scope(arena);
      Few& f = *arena.take<Few>(1);
      take_few(q, head / p.Hkv, head % p.Hkv, arena, f);
      for (int r = 0; r < rows; ++r) {
        V top = V{} - kInf;
        const A* from = partial + (head * splits * rows + r) * size;
        for (int64_t s = 0; s < splits; ++s) top = maximum(top, V{} + from[s * rows * size]);
        f.reference[r] = top[0];
        f.sum[r] = 0;
        for (int64_t s = 0; s < splits; ++s, from += rows * size) {
          const V alpha = exp2<>(from[0] - finite_or_zero(top));
          f.sum[r] += from[1] * alpha[0];
          for (int64_t d = 0; d < f.columns_v; d += N) {
            A* at = f.out + r * f.columns_v + d;
            store(at, load(at) + load(from + 2 + d) * alpha);
          }
        }
      }
      finish_few(q, f);
    });
    std::free(partial);
  }

  static void forward(const AttentionParams& p, const Parallel& parallel) {
    if (p.B * p.H * p.L == 0) return;
    Problem q(p);
    if (has_few_rows(q)) return forward_few(q, parallel);
    const int64_t splits = key_splits(q);
    const int64_t per_task = splits > 1 ? 1 : tiles_per_task(q, parallel.threads, q.depth + q.p.Dv);
    const int64_t rows_v = round_up(p.Dv, Format::kRows);
    const int64_t tasks_per_head = (q.tiles + per_task - 1) / per_task;
    const int64_t keys = q.key_end - q.key_begin;
    const int64_t per_split = splits > 1 ? round_up((keys + splits - 1) / splits, kBlock) : keys;
    const int64_t partials = splits > 1 ? p.B * p.Hkv * q.tiles * splits : 0;
    const int64_t partial_size = rows_v * kTile + 2 * kTile;
    A* partial = partials ? static_cast<A*>(std::malloc(size_t(partials * partial_size) * sizeof(A))) : nullptr;
    if (partials && !partial) throw std::bad_alloc();

    for_each_task(parallel, p.B * p.Hkv * tasks_per_head * splits, [&](int64_t task, int) {
      typename Format::Configuration configuration;
      Arena& arena = thread_arena();
      Arena::Scope scope(arena);
      const int64_t split = task % splits, unit = task / splits;
      // The last tiles first: under a causal mask they are the longest.
      const int64_t head = unit / tasks_per_head, part = tasks_per_head - 1 - unit % tasks_per_head;
      const int64_t b = head / p.Hkv, hk = head % p.Hkv;
      const int64_t first = part * per_task, count = min(per_task, q.tiles - first);

      Tile* tiles = arena.take<Tile>(count);
      State* states = arena.take<State>(count);
      E* panels = arena.take<E>(count * q.depth * kTile);
      Pipeline pipeline(q, arena);
      KeyScratch scratch;
      scratch.take(arena, q, Use::forward);
      int64_t key_begin = p.S, key_end = 0;
      for (int64_t t = 0; t < count; ++t) {
        make_tile(q, b, hk, first + t, tiles[t]);
        pack_transposed(tiles[t], p.query, p.D, q.depth, panels + t * q.depth * kTile);
        states[t].out = arena.take_zero<A>(rows_v * kTile);
        start_state(q, tiles[t], split == 0, states[t]);
        key_begin = min(key_begin, tiles[t].lo_min);
        key_end = max(key_end, tiles[t].hi_max);
      }
      if (splits > 1) {
        key_begin = max(key_begin, round_down(q.key_begin, kBlock) + split * per_split);
        key_end = min(key_end, round_down(q.key_begin, kBlock) + (split + 1) * per_split);
      }
      for (int64_t begin = round_down(key_begin, kBlock); begin < key_end; begin += kBlock) {
        KeyBlock block = make_block(q, b, hk, begin, min(begin + kBlock, p.S), Use::forward, scratch);
        pipeline.run(q, tiles, states, panels, count, block);
      }
      if (splits == 1) {
        for (int64_t t = 0; t < count; ++t) finish_tile(q, tiles[t], states[t]);
      } else {
        A* to = partial + ((head * q.tiles + first) * splits + split) * partial_size;
        std::memcpy(to, states[0].reference, sizeof states[0].reference);
        std::memcpy(to + kTile, states[0].sum, sizeof states[0].sum);
        std::memcpy(to + 2 * kTile, states[0].out, size_t(p.Dv * kTile) * sizeof(A));
      }
    });

    if (splits > 1)  // merge in order of the splits
      for_each_task(parallel, p.B * p.Hkv * q.tiles, [&](int64_t task, int) {
        Arena& arena = thread_arena();
        Arena::Scope scope(arena);
        Tile& tile = *arena.take<Tile>(1);
        make_tile(q, task / q.tiles / p.Hkv, task / q.tiles % p.Hkv, task % q.tiles, tile);
        State state;
        state.out = arena.take_zero<A>(rows_v * kTile);
        const A* from = partial + task * splits * partial_size;
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          V top = V{} - kInf;
          for (int64_t s = 0; s < splits; ++s) top = maximum(top, load(from + s * partial_size + v * N));
          state.reference[v] = top;
          state.sum[v] = V{};
          V shift = finite_or_zero(top);
          for (int64_t s = 0; s < splits; ++s) {
            const A* part = from + s * partial_size;
            V alpha = exp2<>(load(part + v * N) - shift);
            state.sum[v] += load(part + kTile + v * N) * alpha;
            for (int64_t d = 0; d < p.Dv; ++d) {
              A* at = state.out + d * kTile + v * N;
              store(at, load(at) + load(part + (2 + d) * kTile + v * N) * alpha);
            }
          }
        }
        finish_tile(q, tile, state);
      });
    std::free(partial);
  }

  // What turns scores back into weights: 2^(score - reference - log_sum). The log-sum-exp alone says it (reference 0),
  // except where it is so large that its last bit is not small: a row that is finfo.min everywhere has equal weights,
  // but its log-sum-exp cannot hold the logarithm of their number. Such rows are summed once more.
  struct Level {
    V reference[NV], log_sum[NV];
  };
  static void find_level(const Problem& q, const Tile& tile, const E* query_panel, Arena& arena,
                         const KeyScratch& key_scratch, Scores& s, Level& level) {
    const A* lse = static_cast<const A*>(q.p.lse.data);
    bool large = false;
    for (int r = 0; r < kTile; ++r) {
      A value = kInf;  // rows that see nothing: their weights are 0
      if (tile.seen[r]) value = lse[(tile.b * q.p.H + tile.head[r]) * q.p.L + tile.row[r]] * A(kLog2e);
      // Nor may the change of units make a finite log-sum-exp infinite.
      if (tile.seen[r]) large |= value - value != 0 || value > A(1 << 20) || value < -A(1 << 20);
      level.reference[r / N][r % N] = 0;
      level.log_sum[r / N][r % N] = value;
    }
    if (!large) return;
    State state;
    state.out = arena.take_zero<A>(round_up(q.p.Dv, Format::kRows) * kTile);
    E* weights = kPairs ? arena.take<E>(kBlock * kTile) : nullptr;
    start_state(q, tile, true, state);
    for (int64_t begin = round_down(tile.lo_min, kBlock); begin < tile.hi_max; begin += kBlock) {
      KeyBlock block = make_block(q, tile.b, tile.head[0] / q.group, begin, min(begin + kBlock, q.p.S), Use::scores, key_scratch);
      if (score_tile(q, tile, query_panel, block, s, nullptr)) weigh_again(q, tile, s, weights, state);
    }
    for (int v = 0; v < NV; ++v) {
      level.reference[v] = finite_or_zero(state.reference[v]);
      V log_sum = log2<A>(state.sum[v]);
      log_sum = state.sum[v] == 0 ? V{} - kInf : log_sum;
      level.log_sum[v] = level.log_sum[v] == kInf ? level.log_sum[v] : log_sum;
    }
  }

  // --- backward -----------------------------------------------------------------------------------------------------
  //
  // With P = exp(score - lse), dP = dO V^T and delta = rowsum(dO * O) - dlse, the gradient of a (masked, biased) score
  // is dS = P * (dP - delta). Everything else is a product with P or dS.

  struct GradTile {
    V delta[NV], grad_lse[NV];
    Level level;
    double alibi[kTile];   // sum of dS * distance per row
    bool one_block;        // all keys of the tile lie in one block: delta comes from P and dP themselves
    E *query_t, *query, *grad_out_t, *grad_out;
    A* grad_query_t;       // [D][kTile]
  };
  struct GradScratch {
    Scores scores;
    A *grad_weights, *bend;
    E *weights_rows, *grad_rows, *grad_pairs;  // pair format: P and dS with pairs along the rows, dS along the keys
    int64_t columns, columns_v;                // D and Dv as padded in grad_key, grad_value and the row panels
    void take(Arena& arena, const Problem& q) {
      scores.take(arena, q);
      grad_weights = arena.take<A>(kBlock * kTile);
      bend = q.p.softcap > 0 ? arena.take<A>(kBlock * kTile) : nullptr;
      weights_rows = kPairs ? arena.take<E>(kBlock * kTile) : nullptr;
      grad_rows = kPairs ? arena.take<E>(kBlock * kTile) : nullptr;
      grad_pairs = kPairs ? arena.take<E>(kBlock * kTile) : nullptr;
      columns = round_up(q.p.D, N);
      columns_v = round_up(q.p.Dv, N);
    }
  };

  static void reserve(const Problem& q, const GradScratch& scratch, Arena& arena, GradTile& g) {
    g.query_t = arena.take<E>(q.depth * kTile);
    g.grad_out_t = arena.take<E>(q.depth_v * kTile);
    g.query = arena.take<E>(kTile * scratch.columns);
    g.grad_out = arena.take<E>(kTile * scratch.columns_v);
    g.grad_query_t = arena.take<A>(round_up(q.p.D, Format::kRows) * kTile);
  }
  static void prepare(const Problem& q, const AttentionGradParams& p, const Tile& tile, GradScratch& scratch,
                      const KeyScratch& key_scratch, Arena& arena, GradTile& g) {
    pack_transposed(tile, p.query, p.D, q.depth, g.query_t);
    pack_transposed(tile, p.grad_out, p.Dv, q.depth_v, g.grad_out_t);
    pack_rows(tile, p.query, p.D, scratch.columns, g.query);
    pack_rows(tile, p.grad_out, p.Dv, scratch.columns_v, g.grad_out);
    std::memset(static_cast<void*>(g.grad_query_t), 0, size_t(round_up(p.D, Format::kRows) * kTile) * sizeof(A));
    find_level(q, tile, g.query_t, arena, key_scratch, scratch.scores, g.level);
    const A* grad_lse = static_cast<const A*>(p.grad_lse.data);
    for (int r = 0; r < kTile; ++r) {
      A delta = 0, lse = 0;
      const int64_t h = tile.head[r], i = tile.row[r];
      if (r < tile.count) {
        if (tile.seen[r]) {
          const T* out = static_cast<const T*>(p.out.data) + offset(p.out, tile.b, h, i);
          const T* grad = static_cast<const T*>(p.grad_out.data) + offset(p.grad_out, tile.b, h, i);
          V sum{};
          for (int64_t d = 0; d < p.Dv; d += N)
            sum += load_row<A>(out + d, 1, p.Dv - d) * load_row<A>(grad + d * p.grad_out.stride[3], p.grad_out.stride[3], p.Dv - d);
          delta = reduce_add<A>(sum);
        }
        if (grad_lse) lse = grad_lse[offset(p.grad_lse, tile.b, h, i)];
      }
      g.grad_lse[r / N][r % N] = lse;
      g.delta[r / N][r % N] = delta - lse;
    }
    for (double& x : g.alibi) x = 0;
    g.one_block = !kSame<T, A> && tile.lo_min < tile.hi_max && tile.lo_min / kBlock == (tile.hi_max - 1) / kBlock;
  }

  // dS for one tile and key block into scratch.grad_weights (before the softcap's derivative); in pair format also the
  // operands of the products. The scores become P after dropout.
  static bool grad_score_tile(const Problem& q, const Tile& tile, GradTile& g, const KeyBlock& block,
                              GradScratch& scratch) {
    if (!score_tile(q, tile, g.query_t, block, scratch.scores, scratch.bend)) return false;
    const Span span = scratch.scores.span;
    const A factor = scratch.scores.factor;
    A* scores = scratch.scores.scores;
    const int64_t keys = span.end - span.begin, at = span.begin * kTile;
    Format::scores(keys, q.depth_v, block.value.data + span.begin * block.value.ld, block.value.ld, g.grad_out_t,
                   scratch.grad_weights + at);
    const bool dropout = q.has_dropout();
    auto weight = [&](int64_t x, int v) {
      return exp2<>(load(scores + x) * factor - g.level.reference[v] - g.level.log_sum[v]);
    };
    V delta[NV], alibi[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) delta[v] = g.delta[v], alibi[v] = V{};
    if (g.one_block) {
      // rowsum(dO * O) through the rounded O is off by that rounding, which is all that is left where few keys share
      // the weight and dP - delta cancels.
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) delta[v] = -g.grad_lse[v];
      for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          const int64_t x = at + j * kTile + v * N;
          V term = weight(x, v) * load(scratch.grad_weights + x);
          if (dropout) term *= dropout_keep(q, tile, v, block.begin + span.begin + j);
          delta[v] += load(scores + x) == -kInf ? V{} : term;
        }
    }
    for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const int64_t x = at + j * kTile + v * N, key = block.begin + span.begin + j;
        V s = load(scores + x);
        V p = weight(x, v);
        V dp = load(scratch.grad_weights + x);
        V kept = p;
        if (dropout) {
          V keep = dropout_keep(q, tile, v, key);
          kept = p * keep;
          dp *= keep;
        }
        V ds = p * (dp - delta[v]);
        ds = s == -kInf ? V{} : ds;
        if (q.p.alibi.data) {
          V distance = load(tile.diagonal + v * N) - A(key);
          alibi[v] += ds * (distance < 0 ? -distance : distance);
        }
        store(scratch.grad_weights + x, ds);
        if constexpr (kPairs) {
          if (scratch.bend) ds *= load(scratch.bend + x);
          store(scores + x, ds);
          round_store(scratch.weights_rows + x, kept);
          round_store(scratch.grad_rows + x, ds);
        } else {
          store(scores + x, kept);
        }
      }
    if (q.p.alibi.data)
      for (int r = 0; r < kTile; ++r) g.alibi[r] += double(alibi[r / N][r % N]);
    return true;
  }

  static void grad_products(const Problem& q, GradTile& g, const KeyBlock& block, const GradScratch& scratch, A* grad_key,
                            A* grad_value) {
    const Span span = scratch.scores.span;
    const A* scores = scratch.scores.scores;
    const int64_t keys = span.end - span.begin, at = span.begin * kTile;
    const E *weights, *grads, *pairs;
    if constexpr (kPairs) {
      for (int64_t j = 0; j < keys; j += 2)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
          const int64_t x = at + j * kTile + v * N;
          store_pair(scratch.grad_pairs + at + j * kTile + v * 2 * N, load(scores + x), load(scores + x + kTile));
        }
      weights = scratch.weights_rows + at;
      grads = scratch.grad_rows + at;
      pairs = scratch.grad_pairs + at;
    } else {
      if (scratch.bend)
        for (int64_t x = at; x < at + keys * kTile; x += N)
          store(scratch.grad_weights + x, load(scratch.grad_weights + x) * load(scratch.bend + x));
      weights = scores + at;
      grads = pairs = scratch.grad_weights + at;
    }
    Format::keys(keys, scratch.columns_v, weights, g.grad_out, grad_value + span.begin * scratch.columns_v);
    Format::keys(keys, scratch.columns, grads, g.query, grad_key + span.begin * scratch.columns);
    Format::outputs(round_up(q.p.D, Format::kRows), keys, block.key_t.at(0, span.begin), block.key_t.ld, pairs,
                    g.grad_query_t);
  }

  static int64_t mask_extent(const View& mask, int dimension, int64_t size) { return mask.stride[dimension] ? size : 1; }

  // Adds or stores a [keys][kTile] tile of dS at rows (b, h, i), keys [begin, end) of the mask's gradient.
  template <class M>
  static void put_mask_grad(const View& view, const Tile& tile, int64_t begin, int64_t keys, const A* grad, bool add) {
    M* data = static_cast<M*>(view.data);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v)
      for (int64_t j = 0; j < keys; j += N) {
        V block[N];
        for (int i = 0; i < N; ++i) block[i] = j + i < keys ? load(grad + (j + i) * kTile + v * N) : V{};
        transpose<A>(block);
        for (int i = 0; i < N; ++i) {
          int r = v * N + i;
          if (r >= tile.count) break;
          M* to = data + offset(view, tile.b, tile.head[r], tile.row[r], begin + j);
          if constexpr (sizeof(A) == 8 && sizeof(M) == 4) {
            for (int64_t k = 0; k < min(N, keys - j); ++k) to[k] = M(A(to[k]) * A(add) + block[i][k]);
          } else {
            if (add) block[i] += load_row<A>(to, 1, keys - j);
            store_row<A>(to, 1, keys - j, block[i]);
          }
        }
      }
  }
  static void put_mask_grad(const View& view, const Tile& tile, int64_t begin, int64_t keys, const A* grad, bool add) {
    if (view.dtype == DType::f32) return put_mask_grad<float>(view, tile, begin, keys, grad, add);
    put_mask_grad<T>(view, tile, begin, keys, grad, add);
  }

  // Rows of grad_query (times scale) out of a tile's grad_query^T.
  static void put_grad_query(const Problem& q, const View& view, const Tile& tile, const A* grad_t) {
    T* data = static_cast<T*>(view.data);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v)
      for (int64_t d = 0; d < q.p.D; d += N) {
        V block[N];
        for (int i = 0; i < N; ++i) block[i] = d + i < q.p.D ? load(grad_t + (d + i) * kTile + v * N) * A(q.p.scale) : V{};
        transpose<A>(block);
        for (int i = 0; i < N; ++i) {
          int r = v * N + i;
          if (r >= tile.count) break;
          T* row = data + offset(view, tile.b, tile.head[r], tile.row[r], d);
          store_row<A>(row, view.stride[3], q.p.D - d, tile.seen[r] ? block[i] : V{});
        }
      }
  }
  // Rows [begin, end) of grad_key or grad_value. A key that no query sees has zero gradient even where a NaN of some
  // query met its zero weight.
  static void put_grad_keys(const Problem& q, const View& view, int64_t columns, int64_t b, int64_t hk, int64_t begin,
                            int64_t end, const A* grad, int64_t padded, A scale) {
    T* data = static_cast<T*>(view.data);
    for (int64_t j = begin; j < end; ++j) {
      const A* from = grad + (j - begin) * padded;
      T* to = data + offset(view, b, hk, j);
      V finite{};
      for (int64_t d = 0; d < columns; d += N) finite += load(from + d) * A(0);
      const bool hide = reduce_add<A>(finite) != 0 && !key_is_seen(q, b, hk, j);
      for (int64_t d = 0; d < columns; d += N)
        store_row<A>(to + d * view.stride[3], view.stride[3], columns - d, hide ? V{} : load(from + d) * scale);
    }
  }

  static void backward(const AttentionGradParams& p, const Parallel& parallel) {
    const int64_t heads = p.B * p.Hkv;
    if (heads == 0) return;
    Problem q(p);
    const View& mask = p.grad_mask;
    const bool whole = (mask.stride[2] || p.L == 1) && (mask.stride[3] || p.S == 1) && (mask.stride[1] || p.H == 1);
    const bool accumulates = !mask.stride[0] && p.B > 1;
    const bool accurate = mask.dtype == DType::f64 || (mask.dtype == DType::f32 && sizeof(A) == 4);
    const bool fused_mask = mask.data && whole && (!accumulates || accurate);
    if (mask.data) {
      int64_t count = mask_extent(mask, 0, p.B) * mask_extent(mask, 1, p.H) * mask_extent(mask, 2, p.L) * mask_extent(mask, 3, p.S);
      std::memset(mask.data, 0, size_t(count) * (mask.dtype == DType::f64 ? 8 : mask.dtype == DType::f32 ? 4 : 2));
    }
    // A mask shared by the batch is summed by the one task that owns its head, in order of the batch.
    const bool by_head = fused_mask && accumulates;
    const int64_t units = by_head ? p.Hkv : heads;
    const int64_t keys = p.L > 0 ? max(q.key_end - q.key_begin, 0) : 0;
    const int64_t chunks = max(1, min((4 * parallel.threads + units - 1) / units, keys / 512));
    const int64_t per_chunk = max(kBlock, round_up((p.S + chunks - 1) / chunks, kBlock));
    const int64_t tile_size = p.D * kTile;
    A* partial = nullptr;
    if (chunks > 1) {
      partial = static_cast<A*>(std::malloc(size_t(chunks * heads * q.tiles * tile_size) * sizeof(A)));
      if (!partial) throw std::bad_alloc();
    }
    double* alibi = nullptr;
    if (p.grad_alibi.data) {
      alibi = static_cast<double*>(std::calloc(size_t(chunks * p.B * p.H), sizeof(double)));
      if (!alibi) {
        std::free(partial);
        throw std::bad_alloc();
      }
    }
    if (p.grad_sinks.data) std::memset(p.grad_sinks.data, 0, size_t(p.B * p.H) * sizeof(A));

    for_each_task(parallel, units * chunks, [&](int64_t task, int) {
      typename Format::Configuration configuration;
      const int64_t chunk = task % chunks, unit = task / chunks;
      const int64_t chunk_begin = chunk * per_chunk, chunk_end = min(p.S, chunk_begin + per_chunk);
      for (int64_t b = by_head ? 0 : unit / p.Hkv; b < (by_head ? p.B : unit / p.Hkv + 1); ++b)
        backward_head(q, p, b, by_head ? unit : unit % p.Hkv, chunk, chunk_begin, max(chunk_begin, chunk_end), fused_mask,
                      by_head && b > 0, partial ? partial + (chunk * heads) * q.tiles * tile_size : nullptr,
                      alibi ? alibi + chunk * p.B * p.H : nullptr);
    });

    if (partial)
      for_each_task(parallel, heads * q.tiles, [&](int64_t task, int) {
        Arena& arena = thread_arena();
        Arena::Scope scope(arena);
        Tile& tile = *arena.take<Tile>(1);
        make_tile(q, task / q.tiles / p.Hkv, task / q.tiles % p.Hkv, task % q.tiles, tile);
        A* sum = partial + task * tile_size;
        for (int64_t c = 1; c < chunks; ++c) {
          const A* more = partial + (c * heads * q.tiles + task) * tile_size;
          for (int64_t x = 0; x < tile_size; x += N) store(sum + x, load(sum + x) + load(more + x));
        }
        put_grad_query(q, p.grad_query, tile, sum);
      });
    if (alibi) {
      A* to = static_cast<A*>(p.grad_alibi.data);
      for (int64_t x = 0; x < p.B * p.H; ++x) {
        double sum = 0;
        for (int64_t c = 0; c < chunks; ++c) sum += alibi[c * p.B * p.H + x];
        to[x] = A(-sum);
      }
    }
    std::free(partial);
    std::free(alibi);
    if (mask.data && !fused_mask) mask_gradient(q, p, parallel);
  }

  // Everything that keys [chunk_begin, chunk_end) of one key/value head contribute.
  static void backward_head(const Problem& q, const AttentionGradParams& p, int64_t b, int64_t hk, int64_t chunk,
                            int64_t chunk_begin, int64_t chunk_end, bool fused_mask, bool add_mask, A* partial, double* alibi) {
    Arena& arena = thread_arena();
    Arena::Scope scope(arena);
    GradScratch scratch;
    scratch.take(arena, q);
    KeyScratch key_scratch;
    key_scratch.take(arena, q, Use::backward);
    const int64_t span_keys = round_up(chunk_end - chunk_begin, kBlock);
    A* grad_key = arena.take_zero<A>(span_keys * scratch.columns);
    A* grad_value = arena.take_zero<A>(span_keys * scratch.columns_v);
    const int64_t together = max(1, min(8, (512 << 10) / (2 * (q.depth + q.depth_v) * kTile * int64_t(sizeof(A)))));
    Tile* tiles = arena.take<Tile>(together);
    GradTile* grads = arena.take<GradTile>(together);
    // Panels of the tiles in flight are the same size every time: take them once.
    for (int64_t t = 0; t < together; ++t) reserve(q, scratch, arena, grads[t]);

    for (int64_t first = 0; first < q.tiles; first += together) {
      const int64_t count = min(together, q.tiles - first);
      int64_t key_begin = p.S, key_end = 0;
      for (int64_t t = 0; t < count; ++t) {
        make_tile(q, b, hk, first + t, tiles[t]);
        prepare(q, p, tiles[t], scratch, key_scratch, arena, grads[t]);
        key_begin = min(key_begin, tiles[t].lo_min);
        key_end = max(key_end, tiles[t].hi_max);
      }
      key_begin = max(key_begin, chunk_begin);
      key_end = min(key_end, chunk_end);
      for (int64_t begin = round_down(key_begin, kBlock); begin < key_end; begin += kBlock) {
        KeyBlock block = make_block(q, b, hk, begin, min(begin + kBlock, p.S), Use::backward, key_scratch);
        for (int64_t t = 0; t < count; ++t) {
          if (!grad_score_tile(q, tiles[t], grads[t], block, scratch)) continue;
          const Scores& s = scratch.scores;
          if (fused_mask)
            put_mask_grad(p.grad_mask, tiles[t], s.begin, s.end - s.begin, scratch.grad_weights + s.span.begin * kTile,
                          add_mask);
          grad_products(q, grads[t], block, scratch, grad_key + (begin - chunk_begin) * scratch.columns,
                        grad_value + (begin - chunk_begin) * scratch.columns_v);
        }
      }
      for (int64_t t = 0; t < count; ++t) {
        if (partial)
          std::memcpy(partial + ((b * p.Hkv + hk) * q.tiles + first + t) * p.D * kTile, grads[t].grad_query_t,
                      size_t(p.D * kTile) * sizeof(A));
        else
          put_grad_query(q, p.grad_query, tiles[t], grads[t].grad_query_t);
        for (int r = 0; r < tiles[t].count; ++r) {
          const int64_t h = tiles[t].head[r];
          if (alibi) alibi[b * p.H + h] += grads[t].alibi[r];
          if (p.grad_sinks.data && chunk == 0) {
            // The sink is a score whose value vector is zero: dS = P_sink (0 - delta).
            A level = static_cast<const A*>(p.lse.data)[(b * p.H + h) * p.L + tiles[t].row[r]] * A(kLog2e);
            V weight = exp2<>(V{} + (sink(p, h) - level));
            static_cast<A*>(p.grad_sinks.data)[b * p.H + h] -= weight[0] * grads[t].delta[r / N][r % N];
          }
        }
      }
    }
    put_grad_keys(q, p.grad_key, p.D, b, hk, chunk_begin, chunk_end, grad_key, scratch.columns, A(p.scale));
    put_grad_keys(q, p.grad_value, p.Dv, b, hk, chunk_begin, chunk_end, grad_value, scratch.columns_v, A(1));
  }

  // The gradient of a mask whose elements are shared by several scores: scores are formed once more, so that each
  // element is summed in full precision, in a fixed order, and rounded once.
  static void mask_gradient(const Problem& q, const AttentionGradParams& p, const Parallel& parallel) {
    const View& mask = p.grad_mask;
    const int64_t batches = mask_extent(mask, 0, p.B), heads = mask_extent(mask, 1, p.H);
    const int64_t row_tiles = (p.L + kTile - 1) / kTile, key_blocks = (p.S + kBlock - 1) / kBlock;
    const bool rows_shared = !mask.stride[2], keys_shared = !mask.stride[3];
    const int64_t outer_rows = rows_shared ? 1 : row_tiles, outer_keys = keys_shared ? 1 : key_blocks;
    for_each_task(parallel, batches * heads * outer_rows * outer_keys, [&](int64_t task, int) {
      typename Format::Configuration configuration;
      Arena& arena = thread_arena();
      Arena::Scope scope(arena);
      GradScratch scratch;
      scratch.take(arena, q);
      KeyScratch key_scratch;
      key_scratch.take(arena, q, Use::backward);
      A* sum = arena.take_zero<A>(kBlock * kTile);
      Tile& tile = *arena.take<Tile>(1);
      GradTile& g = *arena.take<GradTile>(1);
      reserve(q, scratch, arena, g);
      const int64_t key_task = task % outer_keys, row_task = task / outer_keys % outer_rows;
      const int64_t mb = task / outer_keys / outer_rows / heads, mh = task / outer_keys / outer_rows % heads;
      for (int64_t b = mb; b < (batches == 1 ? p.B : mb + 1); ++b)
        for (int64_t h = mh; h < (heads == 1 ? p.H : mh + 1); ++h)
          for (int64_t rt = row_task; rt < (rows_shared ? row_tiles : row_task + 1); ++rt) {
            make_tile_of_head(q, b, h, rt * kTile, tile);
            prepare(q, p, tile, scratch, key_scratch, arena, g);
            for (int64_t kb = key_task; kb < (keys_shared ? key_blocks : key_task + 1); ++kb) {
              if (kb * kBlock >= tile.hi_max || (kb + 1) * kBlock <= tile.lo_min) continue;
              KeyBlock block = make_block(q, b, h / q.group, kb * kBlock, min((kb + 1) * kBlock, p.S), Use::backward, key_scratch);
              if (!grad_score_tile(q, tile, g, block, scratch)) continue;
              const Scores& s = scratch.scores;
              for (int64_t j = s.span.begin; j < s.end - block.begin; ++j)
#pragma GCC unroll 4
                for (int v = 0; v < NV; ++v) {
                  A* at = sum + (keys_shared ? 0 : j * kTile) + v * N;
                  store(at, load(at) + load(scratch.grad_weights + j * kTile + v * N));
                }
            }
          }
      const int64_t key_begin = key_task * kBlock;
      const int64_t keys = keys_shared ? 1 : min(kBlock, p.S - key_begin);
      if (rows_shared) {
        for (int64_t j = 0; j < keys; ++j) {
          A total = 0;
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) total += reduce_add<A>(load(sum + j * kTile + v * N));
          store(sum + j * kTile, V{} + total);
        }
        tile.count = 1;
        tile.row[0] = 0;
      }
      tile.b = mb;
      for (int r = 0; r < tile.count; ++r) tile.head[r] = mh;
      if (row_tiles && key_blocks) put_mask_grad(mask, tile, key_begin, keys, sum, false);
    });
  }

  // --- weights ------------------------------------------------------------------------------------------------------

  static void weights(const AttentionWeightsParams& p, const Parallel& parallel) {
    if (p.B * p.H * p.L * p.S == 0) return;
    Problem q(p);
    const int64_t row_tiles = (p.L + kTile - 1) / kTile;
    const int64_t outer = p.average ? 1 : p.H, inner = p.average ? p.H : 1;
    const A factor_out = A(1) / A(inner);
    for_each_task(parallel, p.B * outer * row_tiles, [&](int64_t task, int) {
      typename Format::Configuration configuration;
      Arena& arena = thread_arena();
      Arena::Scope scope(arena);
      const int64_t rt = task % row_tiles, h0 = task / row_tiles % outer, b = task / row_tiles / outer;
      Tile* tiles = arena.take<Tile>(inner);
      E* panels = arena.take<E>(inner * q.depth * kTile);
      Level* levels = arena.take<Level>(inner);
      A* sum = arena.take<A>(kBlock * kTile);
      Scores s;
      s.take(arena, q);
      KeyScratch scratch;
      scratch.take(arena, q, Use::scores);
      for (int64_t x = 0; x < inner; ++x) {
        make_tile_of_head(q, b, h0 + x, rt * kTile, tiles[x]);
        pack_transposed(tiles[x], p.query, p.D, q.depth, panels + x * q.depth * kTile);
        find_level(q, tiles[x], panels + x * q.depth * kTile, arena, scratch, s, levels[x]);
      }
      for (int64_t begin = 0; begin < p.S; begin += kBlock) {
        const int64_t end = min(begin + kBlock, p.S);
        std::memset(static_cast<void*>(sum), 0, size_t(kBlock * kTile) * sizeof(A));
        KeyBlock block{};
        for (int64_t x = 0; x < inner; ++x) {
          if (x == 0 || (h0 + x) % q.group == 0) block = make_block(q, b, (h0 + x) / q.group, begin, end, Use::scores, scratch);
          if (!score_tile(q, tiles[x], panels + x * q.depth * kTile, block, s, nullptr)) continue;
          for (int64_t j = s.span.begin; j < s.end - begin; ++j)
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) {
              V w = exp2<>(load(s.scores + j * kTile + v * N) * s.factor - levels[x].reference[v] - levels[x].log_sum[v]);
              if (q.has_dropout()) w *= dropout_keep(q, tiles[x], v, begin + j);
              A* at = sum + j * kTile + v * N;
              store(at, load(at) + w * factor_out);
            }
        }
        put_mask_grad(p.weights, tiles[0], begin, end - begin, sum, false);
      }
    });
  }
};

template <template <class> class Run, class Params>
void dispatch(const Params& p, const Parallel& parallel) {
  switch (p.query.dtype) {
    case DType::f32: return Run<float>::run(p, parallel);
    case DType::f64: return Run<double>::run(p, parallel);
    case DType::bf16: return Run<bf16>::run(p, parallel);
    default: return Run<f16>::run(p, parallel);
  }
}
template <class T>
struct Forward {
  static void run(const AttentionParams& p, const Parallel& parallel) { Attention<T>::forward(p, parallel); }
};
template <class T>
struct Backward {
  static void run(const AttentionGradParams& p, const Parallel& parallel) { Attention<T>::backward(p, parallel); }
};
template <class T>
struct Weights {
  static void run(const AttentionWeightsParams& p, const Parallel& parallel) { Attention<T>::weights(p, parallel); }
};

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {dispatch<Forward, AttentionParams>, dispatch<Backward, AttentionGradParams>,
                                            dispatch<Weights, AttentionWeightsParams>};

}  // namespace fastattn::FASTATTN_ISA
