// As much of CUDA as csrc/cuda/adam.cu needs, done by the CPU, one thread of a block after another: its arithmetic can be
// tested without a GPU. Nothing here waits for other threads of a block, and neither does the kernel.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#define __device__ static inline
#define __global__ static
#define __launch_bounds__(threads)

struct dim3 {
  unsigned x;
  explicit dim3(unsigned count) : x(count) {}
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidDevice };

static dim3 blockIdx(0), threadIdx(0);

static inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }

static inline const char* cudaGetErrorString(cudaError_t) { return "invalid device ordinal"; }

template <typename Argument>
cudaError_t cudaLaunchKernel(void (*kernel)(Argument), dim3 blocks, dim3 threads, void** arguments, size_t, cudaStream_t) {
  for (blockIdx.x = 0; blockIdx.x < blocks.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads.x; ++threadIdx.x) kernel(*static_cast<Argument*>(arguments[0]));
  return cudaSuccess;
}
