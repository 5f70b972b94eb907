#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "stand_in_torch.h"

// The few operations that the device does itself, in its streams; all others are done on the CPU, which waits for the
// current stream.

namespace stand_in {

namespace {

c10::Device chosen(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kType, current_device());
}

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(chosen(device));
  return at::Tensor(at::detail::empty_generic(size, allocator(), kKeys, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(chosen(device));
  return at::Tensor(at::detail::empty_strided_generic(size, stride, allocator(), kKeys, c10::dtype_or_default(dtype)));
}

/// The elements of `tensor`, as a CPU tensor that does not keep them.
at::Tensor host_view(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  at::Tensor view = at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                                  tensor.options().device(at::kCPU).requires_grad(false));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const c10::DeviceIndex index = (from.is_cpu() ? to : from).device().index();
  // The host's tensor may change, or go, once this has returned.
  const at::Tensor source = from.is_cpu() ? from.clone() : host_view(from);
  enqueue(index, [source, target = host_view(to)] { target.copy_(source); });
  if (to.is_cpu()) synchronize(index);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& fill_scalar(at::Tensor& self, const at::Scalar& value) {
  enqueue(self.device().index(), [target = host_view(self), value] { target.fill_(value); });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill_scalar(self, 0); }

at::Tensor& add_in_place(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  if (self.sizes() != other.sizes() || other.is_cpu()) {
    const at::Tensor sum = self.cpu().add_(other.cpu(), alpha);
    copy_from(sum, self, false);
    return self;
  }
  enqueue(self.device().index(),
          [target = host_view(self), other = host_view(other), alpha] { target.add_(other, alpha); });
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) { return self.cpu().item(); }

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  synchronize(self.device().index());  // what was written so far is copied at once
  return at::native::resize_(self, size, format);
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("fill_.Scalar", &fill_scalar);
  library.impl("zero_", &zero);
  library.impl("add_.Tensor", &add_in_place);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

}  // namespace

}  // namespace stand_in
