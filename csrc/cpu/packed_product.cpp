// Rows multiplied by a weight that lies in panels of 32 outputs, in the order in which it is read.
//
// A product of a few rows takes as long as it takes to read the weight. Of a weight in rows, libraries make panels
// anew for each product, or read them in an order that no processor foresees. Here every number of a panel is read once
// for eight rows, and asked for before.

#pragma GCC diagnostic ignored "-Wpsabi"  // no vector is returned: what does is inlined

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../numbers.h"
#include "threads.h"
#include "vectors.h"

#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define COLOSSAL_AMX __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,amx-tile,amx-bf16")))
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace colossal;

namespace {

enum Type : int64_t { kFloat32 = 1, kBFloat16 = 2 };

constexpr int64_t kPanel = 32;    // outputs
constexpr int64_t kDepth = 2048;  // inputs at a time
constexpr int64_t kRowsAtATime = 96;
constexpr int64_t kAhead = 32 * kPanel;      // numbers of a weight between what is multiplied and what is asked for
constexpr int64_t kLeastOfThread = 1 << 18;  // numbers of a weight

struct Product {
  const void* x;       // (rows, inputs)
  const void* weight;  // float32: (panels, inputs, 32); bfloat16: (panels, inputs / 2, 32, 2); zeros behind the last
  const void* bias;    // (outputs), unless it is null
  void* out;           // (rows, outputs)
  int64_t rows, inputs, outputs;
};

template <int64_t kBytes>
struct VectorOf {
  typedef float Type __attribute__((vector_size(kBytes)));
};

// Some inputs of a panel, and of some rows: few enough for the cache.
struct Part {
  int64_t first_row, last_row, panel, begin, end;
};

COLOSSAL_INLINE float with_bias(const Product& given, float sum, int64_t output) {
  return given.bias == nullptr ? sum : sum + static_cast<const float*>(given.bias)[output];
}

// `kRows` rows times as many outputs of a panel as `kVectors` hold, from `first` on; added to what earlier parts wrote.
template <int64_t kBytes, int kRows, int kVectors>
COLOSSAL_INLINE void multiply_block(const Product& given, int64_t row, int64_t first, const Part& part) {
  using Vector = typename VectorOf<kBytes>::Type;
  constexpr int kLanes = kBytes / sizeof(float), kWidth = kVectors * kLanes;
  const int64_t inputs = given.inputs, outputs = std::min<int64_t>(kWidth, given.outputs - first);
  const float* x = static_cast<const float*>(given.x) + row * inputs;
  const float* weight = static_cast<const float*>(given.weight) + (part.panel * inputs + part.begin) * kPanel;
  float* out = static_cast<float*>(given.out) + row * given.outputs + first;
  weight += first % kPanel;
  Vector sums[kRows][kVectors] = {};
  for (int64_t at = part.begin; at < part.end; ++at, weight += kPanel) {
    for (int number = 0; number < kWidth; number += 16) __builtin_prefetch(weight + kAhead + number);  // 64 bytes
    Vector values[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) std::memcpy(&values[v], weight + v * kLanes, kBytes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] += x[r * inputs + at] * values[v];
  }
  for (int r = 0; r < kRows; ++r, out += given.outputs) {
    float found[kWidth];
    for (int v = 0; v < kVectors; ++v) std::memcpy(found + v * kLanes, &sums[r][v], kBytes);
    for (int64_t output = 0; output < outputs; ++output) {
      const float sum = part.begin == 0 ? found[output] : out[output] + found[output];
      out[output] = part.end < inputs ? sum : with_bias(given, sum, first + output);
    }
  }
}

// As many rows at a time of those from one on; returns the first that is left.
template <int64_t kBytes, int kRows, int kVectors>
COLOSSAL_INLINE int64_t multiply_rows(const Product& given, const Part& part, int64_t row) {
  constexpr int64_t kWidth = kVectors * kBytes / sizeof(float);
  const int64_t begin = part.panel * kPanel, end = std::min(begin + kPanel, given.outputs);
  for (; row + kRows <= part.last_row; row += kRows)
    for (int64_t first = begin; first < end; first += kWidth)
      multiply_block<kBytes, kRows, kVectors>(given, row, first, part);
  return row;
}

COLOSSAL_INLINE Part part_at(const Product& given, int64_t row, int64_t panel, int64_t begin) {
  return {row, std::min(row + kRowsAtATime, given.rows), panel, begin, std::min(begin + kDepth, given.inputs)};
}

// The part after another: its next inputs, those of the next panel, or the first of the next rows.
COLOSSAL_INLINE Part next(const Product& given, int64_t begin, int64_t end, const Part& part) {
  if (part.end < given.inputs) return part_at(given, part.first_row, part.panel, part.end);
  if (part.panel + 1 < end) return part_at(given, part.first_row, part.panel + 1, 0);
  return part_at(given, part.last_row, begin, 0);
}

using Run = void (*)(const Product&, int64_t, int64_t);

void run_portable(const Product& given, int64_t begin, int64_t end) {
  for (Part part = part_at(given, 0, begin, 0); part.first_row < given.rows; part = next(given, begin, end, part))
    multiply_rows<16, 1, 4>(given, part, multiply_rows<16, 4, 2>(given, part, part.first_row));
}

// Sums, and what is read for them, are in its 16 registers; of two rows and a whole panel as well.
COLOSSAL_AVX2 void run_avx2(const Product& given, int64_t begin, int64_t end) {
  for (Part part = part_at(given, 0, begin, 0); part.first_row < given.rows; part = next(given, begin, end, part)) {
    const int64_t row = multiply_rows<32, 2, 4>(given, part, multiply_rows<32, 6, 2>(given, part, part.first_row));
    multiply_rows<32, 1, 4>(given, part, row);
  }
}

COLOSSAL_AVX512 void run_avx512(const Product& given, int64_t begin, int64_t end) {
  for (Part part = part_at(given, 0, begin, 0); part.first_row < given.rows; part = next(given, begin, end, part)) {
    const int64_t row = multiply_rows<64, 4, 2>(given, part, multiply_rows<64, 8, 2>(given, part, part.first_row));
    multiply_rows<64, 1, 2>(given, part, multiply_rows<64, 2, 2>(given, part, row));
  }
}

constexpr Run kRuns[] = {run_portable, run_avx2, run_avx512};

#if defined(COLOSSAL_AMX)
constexpr int kTileRows = 16, kTileInputs = 32;

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64};
  uint8_t rows[16] = {};
};

// Tiles: 0 and 1 are sums of 16 outputs each, 2 and 3 parts of their weights, 4 a part of the rows.
COLOSSAL_AMX void run_tiles(const Product& given, int64_t begin, int64_t end) {
  const int64_t inputs = given.inputs;
  for (int64_t row = 0; row < given.rows; row += kTileRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, given.rows - row));
    TileShapes shapes;
    for (int tile = 0; tile < 5; ++tile) shapes.rows[tile] = tile == 2 || tile == 3 ? kTileInputs / 2 : rows;
    _tile_loadconfig(&shapes);
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kPanel;
      const uint16_t* x = static_cast<const uint16_t*>(given.x) + row * inputs;
      const uint16_t* weight = static_cast<const uint16_t*>(given.weight) + first * inputs;
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t at = 0; at < inputs; at += kTileInputs, weight += kTileInputs * kPanel) {
        for (int64_t number = 0; number < kTileInputs * kPanel; number += 32)  // of 64 bytes
          __builtin_prefetch(weight + 2 * kAhead + number);
        _tile_loadd(4, x + at, inputs * 2);
        _tile_loadd(2, weight, kPanel * 4);
        _tile_loadd(3, weight + kPanel, kPanel * 4);
        _tile_dpbf16ps(0, 4, 2);
        _tile_dpbf16ps(1, 4, 3);
      }
      alignas(64) float sums[kTileRows][kPanel];
      _tile_stored(0, &sums[0][0], sizeof sums[0]);
      _tile_stored(1, &sums[0][kPanel / 2], sizeof sums[0]);
      const int64_t outputs = std::min(kPanel, given.outputs - first);
      for (int r = 0; r < rows; ++r) {
        uint16_t* out = static_cast<uint16_t*>(given.out) + (row + r) * given.outputs + first;
        for (int64_t output = 0; output < outputs; ++output)
          out[output] = narrow_bfloat16(with_bias(given, sums[r][output], first + output));
      }
    }
    _tile_release();
  }
}
#endif

}  // namespace

// Whether the processor has vectors for which it is worth to pack weights in float32.
extern "C" int64_t colossal_has_vectors() { return vectors_up_to(2) > 0; }

// Whether it has tiles for bfloat16, and the system lets this process use them.
extern "C" int64_t colossal_has_tiles() {
#if defined(COLOSSAL_AMX)
  unsigned int eax = 7, ebx, ecx = 0, edx;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  const bool is_there = (edx >> 22 & 1) && (edx >> 24 & 1);
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return is_there && vectors_up_to(2) == 2 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return 0;
#endif
}

// level: of float32: 2 for the widest vectors that the processor has, 1 for AVX2 at most, 0 for portable code. In
// bfloat16, there are tiles, and the number of inputs is a multiple of 32.
extern "C" void colossal_packed_product(const Product* given, int64_t type, int64_t max_threads, int64_t level) {
  Run run = kRuns[vectors_up_to(level)];
#if defined(COLOSSAL_AMX)
  if (type == kBFloat16) run = run_tiles;
#endif
  (void)type;
  const int64_t panels = (given->outputs + kPanel - 1) / kPanel;
  const int64_t wanted = std::min(panels, given->outputs * given->inputs / kLeastOfThread + 1);
  const int64_t num_threads = std::max<int64_t>(1, std::min(max_threads, wanted));
  run_in_parts(num_threads, panels, [&](int64_t begin, int64_t end) { run(*given, begin, end); });
}
