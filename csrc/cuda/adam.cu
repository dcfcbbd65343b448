// A step of Adam over many tensors on a GPU, in one pass over its memory: what csrc/cpu/adam.cpp does in the host's.
//
// A launch takes a table of tensors as its argument, so nothing is copied to the device before. Each block computes a
// chunk of one tensor, which it finds by the number of chunks of those before it.

#include <cuda_runtime.h>

#include <cstdint>

#include "../adam.h"

// The kernel finds its tensor in its argument by a number that is known only when it runs. Without this word a compiler
// may first copy the argument into the local memory of each thread. It exists from sm_70 on, and only while code for
// the device is compiled; NVIDIA's own libraries use it from CUDA 12.8 on.
#if defined(__CUDACC_VER_MAJOR__) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700 && \
    __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
#define COLOSSAL_GRID_CONSTANT __grid_constant__
#else
#define COLOSSAL_GRID_CONSTANT
#endif

using namespace colossal;

namespace {

constexpr int kTensors = 48;  // with what follows, less than the 4 KiB that arguments may have
constexpr int kThreads = 256;
constexpr int kWidth = 4;  // elements that a thread loads at once
constexpr int64_t kChunk = 16 * kThreads * kWidth;

struct Table {
  Tensor tensors[kTensors];
  int64_t first_chunk[kTensors];  // of each tensor, in this launch
  int32_t count;
  Step step;
};

struct alignas(4 * kWidth) Words {
  uint32_t at[kWidth];
};

struct alignas(2 * kWidth) Halves {
  uint16_t at[kWidth];
};

__device__ float widen(uint16_t half, uint8_t type) {
  return type == kBFloat16 ? widen_bfloat16(half) : widen_float16(half);
}

__device__ uint16_t narrow(float value, uint8_t type) {
  return type == kBFloat16 ? narrow_bfloat16(value) : narrow_float16(value);
}

// Up to kWidth elements: all at once where the address allows.
__device__ void load(const void* from, uint8_t type, int64_t at, int n, bool is_aligned, float (&to)[kWidth]) {
  if (type == kFloat32) {
    const float* values = static_cast<const float*>(from) + at;
    if (is_aligned) {
      const Words words = *reinterpret_cast<const Words*>(values);
      for (int i = 0; i < kWidth; ++i) to[i] = bits_to_float(words.at[i]);
    } else {
      for (int i = 0; i < kWidth; ++i) to[i] = i < n ? values[i] : 0.0f;
    }
    return;
  }
  const uint16_t* values = static_cast<const uint16_t*>(from) + at;
  if (is_aligned) {
    const Halves halves = *reinterpret_cast<const Halves*>(values);
    for (int i = 0; i < kWidth; ++i) to[i] = widen(halves.at[i], type);
  } else {
    for (int i = 0; i < kWidth; ++i) to[i] = i < n ? widen(values[i], type) : 0.0f;
  }
}

__device__ void store(const float (&from)[kWidth], void* to, uint8_t type, int64_t at, int n, bool is_aligned) {
  if (type == kFloat32) {
    float* values = static_cast<float*>(to) + at;
    if (is_aligned) {
      Words words;
      for (int i = 0; i < kWidth; ++i) words.at[i] = float_to_bits(from[i]);
      *reinterpret_cast<Words*>(values) = words;
    } else {
      for (int i = 0; i < n; ++i) values[i] = from[i];
    }
    return;
  }
  uint16_t* values = static_cast<uint16_t*>(to) + at;
  if (is_aligned) {
    Halves halves;
    for (int i = 0; i < kWidth; ++i) halves.at[i] = narrow(from[i], type);
    *reinterpret_cast<Halves*>(values) = halves;
  } else {
    for (int i = 0; i < n; ++i) values[i] = narrow(from[i], type);
  }
}

__device__ bool fits(const void* address, uint8_t type) {
  const uintptr_t size = type == kFloat32 ? sizeof(Words) : sizeof(Halves);
  return reinterpret_cast<uintptr_t>(address) % size == 0;  // an absent copy fits
}

__device__ void update(const Tensor& tensor, const Step& step, int64_t at, int n, bool is_aligned) {
  float param[kWidth], grad[kWidth], exp_avg[kWidth], exp_avg_sq[kWidth];
  load(tensor.param, tensor.param_type, at, n, is_aligned, param);
  load(tensor.grad, tensor.grad_type, at, n, is_aligned, grad);
  load(tensor.exp_avg, kFloat32, at, n, is_aligned, exp_avg);
  load(tensor.exp_avg_sq, kFloat32, at, n, is_aligned, exp_avg_sq);
  for (int i = 0; i < kWidth; ++i) {
    const float p = step.is_decoupled ? param[i] * (1.0f - step.decay) : param[i];
    const float g = step.is_decoupled ? grad[i] * step.grad_scale : grad[i] * step.grad_scale + step.decay * p;
    exp_avg[i] = step.beta1 * exp_avg[i] + step.rest1 * g;
    exp_avg_sq[i] = step.beta2 * exp_avg_sq[i] + step.rest2 * g * g;
    param[i] = p - step.step_size * exp_avg[i] / (sqrtf(exp_avg_sq[i]) * step.root_scale + step.eps);
  }
  store(exp_avg, tensor.exp_avg, kFloat32, at, n, is_aligned);
  store(exp_avg_sq, tensor.exp_avg_sq, kFloat32, at, n, is_aligned);
  store(param, tensor.param, tensor.param_type, at, n, is_aligned);
  if (tensor.copy_type != kNone) store(param, tensor.copy, tensor.copy_type, at, n, is_aligned);
}

__global__ void __launch_bounds__(kThreads) adam(const COLOSSAL_GRID_CONSTANT Table table) {
  const int64_t chunk = blockIdx.x;
  int low = 0, high = table.count - 1;  // the last tensor that begins at this chunk or before
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.first_chunk[middle] <= chunk) low = middle;
    else high = middle - 1;
  }
  const Tensor& tensor = table.tensors[low];
  const bool is_aligned = fits(tensor.param, tensor.param_type) && fits(tensor.grad, tensor.grad_type) &&
                          fits(tensor.exp_avg, kFloat32) && fits(tensor.exp_avg_sq, kFloat32) &&
                          fits(tensor.copy, tensor.copy_type);
  const int64_t begin = (chunk - table.first_chunk[low]) * kChunk;
  const int64_t end = begin + kChunk < tensor.numel ? begin + kChunk : tensor.numel;
  for (int64_t at = begin + threadIdx.x * kWidth; at < end; at += kThreads * kWidth) {
    const int n = end - at < kWidth ? static_cast<int>(end - at) : kWidth;
    update(tensor, table.step, at, n, is_aligned && n == kWidth);
  }
}

cudaError_t launch(Table& table, int64_t chunks, cudaStream_t stream) {
  void* arguments[] = {&table};
  const dim3 blocks(static_cast<unsigned>(chunks)), threads(kThreads);
  const cudaError_t code = cudaLaunchKernel(adam, blocks, threads, arguments, 0, stream);
  table.count = 0;
  return code;
}

}  // namespace

// Returns a message about what went wrong, or nothing. `device` is the one that the tensors and the stream belong to.
extern "C" const char* colossal_adam(const Tensor* tensors, int64_t count, const Step* step, int device, void* stream) {
  constexpr int64_t kMostChunks = (int64_t{1} << 31) - 1;
  static_assert(sizeof(Table) <= 4096, "the table is an argument of the kernel");
  cudaError_t code = cudaSetDevice(device);
  Table table;
  table.step = *step;
  table.count = 0;
  int64_t chunks = 0;
  for (int64_t i = 0; i < count && code == cudaSuccess; ++i) {
    const int64_t own = (tensors[i].numel + kChunk - 1) / kChunk;
    if (own == 0) continue;
    if (table.count == kTensors || (table.count > 0 && chunks + own > kMostChunks)) {
      code = launch(table, chunks, static_cast<cudaStream_t>(stream));
      chunks = 0;
    }
    table.tensors[table.count] = tensors[i];
    table.first_chunk[table.count++] = chunks;
    chunks += own;
  }
  if (table.count > 0 && code == cudaSuccess) code = launch(table, chunks, static_cast<cudaStream_t>(stream));
  return code == cudaSuccess ? nullptr : cudaGetErrorString(code);
}
