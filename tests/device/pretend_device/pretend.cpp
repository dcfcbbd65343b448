// A pretend accelerator: real values in host memory, on a device that is not the CPU.
//
// Each operator is the CPU's, on an alias of the same memory, once it is sure that a real device would have done it:
// all tensors on the device, generators of the device, and the use of memory in an order that streams and events make
// sure of.
#include <torch/extension.h>
#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>

#include "device.h"

namespace pretend {
namespace {

using at::Tensor;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor with_storage(c10::Storage storage, const Tensor& like) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kKeys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// A tensor of the CPU over the memory of one on the device.
Tensor alias_of(const Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  c10::DataPtr pointer(const_cast<void*>(storage.data()), c10::Device(c10::DeviceType::CPU));
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), c10::GetAllocator(c10::DeviceType::CPU), true);
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

void use(const Tensor& tensor, bool writes, int64_t stream, uint64_t time, const std::string& name) {
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  if (!block || !tensor.numel()) return;
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  size_t item = tensor.element_size();
  access(*block, tensor.storage_offset() * item, (last + 1) * item, writes, stream, time, name);
}

// ---- copies ---------------------------------------------------------------------------------------------------------
Tensor& into(Tensor& to, const Tensor& from) {
  c10::InferenceMode guard(false);
  at::AutoDispatchBelowADInplaceOrView below;
  return to.copy_(from);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  uint64_t time = tick(current);
  const Clock& clock = clocks[current];
  auto finish_overlapping = [&](const Tensor& host) {
    perform_if([&](const Copy& copy) {
      if (!overlap(copy.host, host)) return false;
      TORCH_CHECK(copy.stream == current || copy.time <= seen(clock, copy.stream), "A wait is missing: a copy on stream ",
                  current, " uses page-locked memory that a copy on stream ", copy.stream, " still uses.");
      return true;
    });
  };
  if (is_ours(from)) use(from, false, current, time, "copy_");
  if (is_ours(to)) use(to, true, current, time, "copy_");
  const Tensor& host_side = is_ours(from) ? to : from;
  if (is_ours(from) && is_ours(to)) {
    Tensor target = alias_of(to);
    into(target, alias_of(from));
    return to;
  }
  if (!non_blocking || !to.numel()) {
    if (to.numel()) note_wait(is_ours(to) ? "a copy to the device that blocks" : "a copy to the host that blocks");
    host_waited(clock);
    Tensor target = is_ours(to) ? alias_of(to) : to;
    into(target, is_ours(from) ? alias_of(from) : from);
    return to;
  }
  if (!is_pinned(host_side.storage().data())) {
    TORCH_CHECK(is_ours(to), "A copy to the host that does not block needs page-locked memory. Found memory of a ",
                "tensor of shape ", to.sizes(), " that is not. Make it with pin_memory=True, or let the copy block.");
    // The driver puts such data aside before it returns: nobody may wait for the device, and the source may change.
    Tensor target = alias_of(to);
    into(target, from);
    return to;
  }
  finish_overlapping(host_side);
  Copy copy{is_ours(from), host_side, {}, {}, &block_of(is_ours(from) ? from : to), current, time};
  if (copy.to_host) copy.snapshot = alias_of(from).clone();
  else copy.device = alias_of(to);
  under_way.push_back(std::move(copy));
  return to;
}

const Tensor& resize_to(const Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (tensor.sizes() == size) return tensor;
  size_t bytes = (c10::multiply_integers(size) + tensor.storage_offset()) * tensor.element_size();
  if (tensor.storage().nbytes() < bytes) hooks.resizePrivateUse1Bytes(tensor.storage(), bytes);
  impl->set_sizes_contiguous(size);
  return tensor;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  resize_to(to, from.sizes(), {});
  return copy_from(from, to, false);
}

c10::Scalar local_scalar(const Tensor& tensor) {
  note_wait("item");
  std::lock_guard<std::recursive_mutex> lock(mutex);
  use(tensor, false, current, tick(current), "item");
  host_waited(clocks[current]);
  return alias_of(tensor).item();
}

// Looks without the host's having to wait, as a check in a kernel does.
void assert_later(const Tensor& tensor, c10::string_view message) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  use(tensor, false, current, tick(current), "_assert_async");
  TORCH_CHECK(alias_of(tensor).item().toBool(), "device-side assert: ", std::string(message));
}

// ---- every other operator -------------------------------------------------------------------------------------------
struct Known {
  bool takes_host_indices, is_random, waits;
};

Known known(const c10::OperatorHandle& op) {
  static std::map<const void*, Known> all;
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto it = all.find(&op.schema());
  if (it != all.end()) return it->second;
  static const std::set<std::string> indexed = {"aten::index", "aten::index_put", "aten::index_put_",
                                                "aten::_index_put_impl_", "aten::_unsafe_index",
                                                "aten::_unsafe_index_put"};
  bool waits = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  const auto& name = op.operator_name().name;
  if (indexed.count(name) || name == "aten::nonzero_static") waits = false;  // looked at by its arguments
  return all[&op.schema()] = {indexed.count(name) > 0, op.hasTag(at::Tag::nondeterministic_seeded), waits};
}

void check_place(const Tensor& tensor, const std::string& name) {
  TORCH_CHECK(!tensor.defined() || is_ours(tensor) || (tensor.dim() == 0 && tensor.is_cpu()),
              "Expected all tensors to be on the same device, but ", name, " got one of shape ", tensor.sizes(), " on ",
              tensor.device(), " beside one on ", c10::Device(kDevice, 0));
}

// While it lives, the CPU's generator draws what a generator of the device would.
struct Draws {
  at::Generator of_cpu = at::detail::getDefaultCPUGenerator(), of_device;
  c10::intrusive_ptr<c10::TensorImpl> own;
  explicit Draws(at::Generator generator) : of_device(std::move(generator)) {
    own = of_cpu.unsafeGetGeneratorImpl()->get_state();
    of_cpu.unsafeGetGeneratorImpl()->set_state(*of_device.unsafeGetGeneratorImpl()->get_state());
  }
  ~Draws() {
    of_device.unsafeGetGeneratorImpl()->set_state(*of_cpu.unsafeGetGeneratorImpl()->get_state());
    of_cpu.unsafeGetGeneratorImpl()->set_state(*own);
  }
};

// The tensors of one call: those of the device, and what stands for them.
struct Call {
  struct Pair { Tensor device, alias; };
  std::vector<Pair> pairs;
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> adopted;

  Tensor host(const Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    for (auto& pair : pairs)
      if (pair.device.is_same(tensor)) return pair.alias;
    pairs.push_back({tensor, alias_of(tensor)});
    return pairs.back().alias;
  }

  Tensor device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    TORCH_CHECK(tensor.layout() == c10::kStrided, "The pretend device has dense tensors only.");
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    for (auto& pair : pairs) {
      if (pair.alias.is_same(tensor)) return pair.device;
      if (pair.alias.storage().unsafeGetStorageImpl() == storage) return with_storage(pair.device.storage(), tensor);
    }
    for (auto& each : adopted)
      if (each.first == storage) return with_storage(each.second, tensor);
    adopted.emplace_back(storage, adopt(tensor.storage()));
    return with_storage(adopted.back().second, tensor);
  }

  // What an operator did to the size of a result that it was given.
  void resize_results() {
    for (auto& pair : pairs) {
      if (pair.alias.sizes() == pair.device.sizes()) continue;
      resize_to(pair.device, pair.alias.sizes(), {});
      pair.device.unsafeGetTensorImpl()->set_sizes_and_strides(pair.alias.sizes(), pair.alias.strides());
      Tensor target = alias_of(pair.device);
      if (pair.alias.storage().data() != pair.device.storage().data()) into(target, pair.alias);
    }
  }
};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  Known what = known(op);
  size_t num = schema.arguments().size(), begin = stack->size() - num;
  std::optional<at::Generator> generator;
  bool has_mask = false, has_list = false;
  for (size_t i = 0; i < num; ++i) {
    const auto& value = (*stack)[begin + i];
    bool may_be_host = what.takes_host_indices && i > 0;
    if (value.isTensor()) {
      if (!may_be_host || schema.arguments()[i].name() == "values") check_place(value.toTensor(), name);
    } else if (value.isTensorList() || value.isOptionalTensorList() || value.isList()) {
      for (const auto& each : value.toListRef()) {
        if (!each.isTensor()) continue;
        const Tensor& tensor = each.toTensor();
        if (!tensor.defined()) continue;
        has_list = true;
        has_mask |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
        if (!may_be_host) check_place(tensor, name);
      }
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
      TORCH_CHECK(generator->device().type() == kDevice, "Expected a '", c10::Device(kDevice).str(),
                  "' device type for generator but found '", generator->device().type(), "'");
    }
  }
  if (what.waits || (what.takes_host_indices && has_list && has_mask)) note_wait(name);

  std::lock_guard<std::recursive_mutex> lock(mutex);
  int64_t stream = current;
  uint64_t time = tick(stream);
  if (what.waits) host_waited(clocks[stream]);
  Call call;
  bool has_write = false;
  for (size_t i = 0; i < num; ++i) {
    auto& value = (*stack)[begin + i];
    const auto* info = schema.arguments()[i].alias_info();
    bool writes = info && info->isWrite();
    bool is_view = info && !writes;
    has_write |= writes;
    auto host = [&](const Tensor& tensor) {
      if (is_ours(tensor) && !is_view) use(tensor, writes, stream, time, name);
      return call.host(tensor);
    };
    if (value.isTensor()) value = host(value.toTensor());
    else if (value.isTensorList()) {
      std::vector<Tensor> all = value.toTensorVector();
      for (Tensor& tensor : all) tensor = host(tensor);
      value = all;
    } else if (value.isOptionalTensorList()) {
      auto all = value.toOptionalTensorVector();
      c10::List<std::optional<Tensor>> hosts;
      for (auto& tensor : all) hosts.push_back(tensor ? std::optional<Tensor>(host(*tensor)) : std::nullopt);
      value = hosts;
    } else if (value.isGenerator()) value = c10::IValue();
    else if (value.isDevice() && value.toDevice().type() == kDevice) value = c10::Device(c10::DeviceType::CPU);
  }
  {
    std::optional<Draws> draws;
    if (what.is_random || generator) draws.emplace(generator.value_or(hooks.getDefaultGenerator(0)));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  if (has_write) call.resize_results();
  size_t returned = stack->size() - begin;
  auto device = [&](const Tensor& tensor) { return call.device(tensor); };
  for (size_t i = 0; i < returned; ++i) {
    auto& value = (*stack)[begin + i];
    if (value.isTensor()) value = device(value.toTensor());
    else if (value.isTensorList()) {
      std::vector<Tensor> all = value.toTensorVector();
      for (Tensor& tensor : all) tensor = device(tensor);
      value = all;
    }
  }
  for (auto& each : call.adopted) {
    auto& block = *static_cast<Block*>(each.second.data_ptr().get_context());
    block.accesses.push_back({0, block.bytes, stream, time, true, name});
  }
}

// ---- operators that are not the CPU's -------------------------------------------------------------------------------
Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}

Tensor strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                         self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return made;
}

Tensor view(const Tensor& self, c10::IntArrayRef size) {
  Tensor seen_so = alias_of(self).view(size);
  return strided(self, seen_so.sizes(), seen_so.strides(), self.storage_offset());
}

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return strided(self, size, stride, self.storage_offset());
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(storage.device().type() == kDevice, "Attempted to set the storage of a tensor on device \"",
              self.device(), "\" to a storage on different device \"", storage.device(), "\".");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride, offset);
  else impl->set_sizes_contiguous(size);
  size_t bytes = (c10::multiply_integers(size) + offset) * self.element_size();
  if (storage.nbytes() < bytes) hooks.resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  return set_storage(self, storage, 0, {(int64_t)(storage.nbytes() / self.element_size())}, {});
}

// `Module.to` keeps parameters the objects that they are, as CUDA's does and as an NPU's does by this operator.
bool may_take_data_of(const Tensor& self, const Tensor& other) {
  auto is_dense = [](const Tensor& t) { return t.layout() == at::kStrided && (t.is_cpu() || is_ours(t)); };
  return self.key_set() == other.key_set() || (is_dense(self) && is_dense(other));
}

void record_stream(Tensor& self, c10::Stream stream) { memory.recordStream(self.storage().data_ptr(), stream); }

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::IntArrayRef stride,
                   c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
                   int64_t groups) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  uint64_t time = tick(current);
  Call call;
  for (const Tensor& each : {input, weight, bias.value_or(Tensor())}) {
    check_place(each, "aten::convolution");
    if (is_ours(each)) use(each, false, current, time, "aten::convolution");
  }
  std::optional<Tensor> own_bias;
  if (bias && bias->defined()) own_bias = call.host(*bias);
  at::AutoDispatchBelowADInplaceOrView below;
  return call.device(at::convolution(call.host(input), call.host(weight), own_bias, stride, padding, dilation,
                                     transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        c10::IntArrayRef stride, c10::IntArrayRef padding,
                                                        c10::IntArrayRef dilation, bool transposed,
                                                        c10::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  uint64_t time = tick(current);
  Call call;
  for (const Tensor& each : {grad, input, weight}) {
    check_place(each, "aten::convolution_backward");
    use(each, false, current, time, "aten::convolution_backward");
  }
  int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  at::AutoDispatchBelowADInplaceOrView below;
  auto [a, b, c] = at::convolution_backward(call.host(grad), call.host(input), call.host(weight),
                                            at::IntArrayRef{channels}, stride, padding, dilation, transposed,
                                            output_padding, groups, mask);
  return {call.device(a), call.device(b), call.device(c)};
}

// As on a GPU, what is between is in float32; the CPU's kernel rounds the logarithm of the sum of 16-bit numbers first.
Tensor log_softmax(const Tensor& self, int64_t dim, bool to_float) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  uint64_t time = tick(current);
  Call call;
  use(self, false, current, time, "aten::_log_softmax");
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor found = at::_log_softmax(call.host(self).to(at::toOpMathType(self.scalar_type())), dim, false);
  return call.device(to_float ? found : found.to(self.scalar_type()));
}

// Attention goes where the CPU's goes: to its flash kernel, unless that lacks something.
}  // namespace

int64_t choose_attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double drop,
                         bool causal, std::optional<double> scale, bool gqa) {
  Call call;
  std::optional<Tensor> own_mask;
  if (mask && mask->defined()) own_mask = call.host(*mask);
  int64_t choice = at::_fused_sdp_choice(call.host(q), call.host(k), call.host(v), own_mask, drop, causal, scale, gqa);
  return choice == (int64_t)sdp::SDPBackend::flash_attention ? (int64_t)sdp::SDPBackend::overrideable : choice;
}

namespace {

using Attention = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

Attention attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, double drop,
                    bool causal, bool, std::optional<double> scale) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  uint64_t time = tick(current);
  Call call;
  for (const Tensor& each : {q, k, v, bias.value_or(Tensor())}) {
    check_place(each, "aten::scaled_dot_product_attention");
    if (is_ours(each)) use(each, false, current, time, "aten::scaled_dot_product_attention");
  }
  std::optional<Tensor> mask;
  if (bias && bias->defined()) mask = call.host(*bias);
  at::AutoDispatchBelowADInplaceOrView below;
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(call.host(q), call.host(k), call.host(v), drop, causal,
                                                                    mask, scale);
  Tensor none = at::empty({0}, at::TensorOptions().dtype(at::kLong));
  Tensor seed = call.device(none), offset = call.device(none.clone()), rest = call.device(none.clone());
  return {call.device(out), call.device(lse), Tensor(), Tensor(), q.sym_size(2), k.sym_size(2), seed, offset, rest};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, std::array<bool, 4>,
    const Tensor& out, const Tensor& lse, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double drop, bool causal,
    const Tensor&, const Tensor&, std::optional<double> scale) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  uint64_t time = tick(current);
  Call call;
  for (const Tensor& each : {grad, q, k, v, out, lse}) use(each, false, current, time, "aten::attention_backward");
  std::optional<Tensor> mask;
  if (bias.defined()) mask = call.host(bias);
  at::AutoDispatchBelowADInplaceOrView below;
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      call.host(grad), call.host(q), call.host(k), call.host(v), call.host(out), call.host(lse), drop, causal, mask, scale);
  return {call.device(dq), call.device(dk), call.device(dv), Tensor()};
}

}  // namespace

void perform(const Copy& copy) {
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor target = copy.to_host ? copy.host : copy.device;
  into(target, copy.to_host ? copy.snapshot : copy.host);
}

REGISTER_ALLOCATOR(kDevice, &memory);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("resize_", resize_to);
  m.impl("_has_compatible_shallow_copy_type", may_take_data_of);
  m.impl("record_stream", record_stream);
  m.impl("_assert_async.msg", assert_later);
  m.impl("_fused_sdp_choice", choose_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  m.impl("_log_softmax", log_softmax);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SINGLE_BY_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(SINGLE)
  AT_FORALL_FP32_SET_OPT_DTYPE(SINGLE_BY_DTYPE)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace pretend

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &pretend::choose_attention)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace pretend;
  m.def("init", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("default_generator", [] { return hooks.getDefaultGenerator(0); });
  m.def("host_alias", [](const at::Tensor& tensor) { return alias_of(tensor); });
  m.def("touch", [](const at::Tensor& tensor, bool writes, int64_t stream, const std::string& name) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    use(tensor, writes, stream, tick(stream), name);
  });
  m.def("waits", [] { std::lock_guard<std::recursive_mutex> lock(mutex); return waits; });
  m.def("forget_waits", [] { std::lock_guard<std::recursive_mutex> lock(mutex); waits.clear(); });
  m.def("refuse_waits", [](bool refuses) { return std::exchange(refuses_waits, refuses); });
  m.def("set_total_memory", [](int64_t bytes) { return std::exchange(stats.total, bytes); });
}
