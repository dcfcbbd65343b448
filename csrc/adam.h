// What the kernels of Adam for the CPU and for CUDA share: how they are called.

#pragma once

#include <cstdint>

#include "numbers.h"

namespace colossal {

enum Type : uint8_t { kNone = 0, kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };

struct Tensor {
  void* param;
  const void* grad;
  float* exp_avg;
  float* exp_avg_sq;
  void* copy;  // none where its type is kNone
  int64_t numel;
  uint8_t param_type, grad_type, copy_type, padding[5];
};

struct Step {
  float step_size, beta1, beta2, rest1, rest2, eps, decay, root_scale, grad_scale;  // rest: what is left to 1
  int32_t is_decoupled;
};

}  // namespace colossal
