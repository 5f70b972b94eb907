#include "reducer/device_copies.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <optional>

#include "reducer/device_streams.h"

namespace ours {
namespace {

/// A torch type as real numbers: the type of its parts.
struct RealType {
  DType dtype;
  int64_t count;  ///< real numbers an element
};

std::optional<RealType> real_type(at::ScalarType type) {
  const int64_t count = c10::isComplexType(type) ? 2 : 1;
  switch (c10::toRealValueType(type)) {
    case at::kHalf:
      return RealType{DType::Float16, count};
    case at::kBFloat16:
      return RealType{DType::BFloat16, count};
    case at::kFloat:
      return RealType{DType::Float32, count};
    case at::kDouble:
      return RealType{DType::Float64, count};
    default:
      return std::nullopt;
  }
}

bool same_order(const at::Tensor& one, const at::Tensor& other) {
  if (one.sizes() != other.sizes()) return false;
  for (int64_t d = 0; d < one.dim(); ++d) {
    if (one.size(d) > 1 && one.stride(d) != other.stride(d)) return false;
  }
  return true;
}

/// The arguments of Device's calls.
struct FlatCopy {
  void* flat;
  DType flat_type;
  DType piece_type;
  std::vector<FlatPiece> pieces;
};

FlatCopy describe(const at::Tensor& flat, const std::vector<PlacedTensor>& tensors) {
  const auto flat_type = real_type(flat.scalar_type());
  const auto piece_type = real_type(tensors.front().tensor.scalar_type());
  TORCH_CHECK(flat_type && piece_type && flat_type->count == piece_type->count, "Gradients of ",
              tensors.front().tensor.scalar_type(), " have no place in a bucket of ", flat.scalar_type(), ".");
  FlatCopy copy{flat.data_ptr(), flat_type->dtype, piece_type->dtype, {}};
  copy.pieces.reserve(tensors.size());
  for (const auto& [tensor, offset] : tensors) {
    if (tensor.numel() == 0) continue;
    TORCH_CHECK(tensor.scalar_type() == tensors.front().tensor.scalar_type() && offset >= 0 &&
                    offset + tensor.numel() <= flat.numel(),
                "A tensor of ", tensor.numel(), " elements of ", tensor.scalar_type(), " at ", offset,
                " does not fit into a flat one of ", flat.numel(), ", or not to the others.");
    copy.pieces.push_back({tensor.data_ptr(), static_cast<size_t>(offset * flat_type->count),
                           static_cast<size_t>(tensor.numel() * flat_type->count)});
  }
  return copy;
}

StreamHandle handle_of(c10::Device device) { return current_stream(device).native_handle(); }

}  // namespace

bool can_place(const at::Tensor& tensor, const at::Tensor& place) {
  if (tensor.layout() != at::kStrided || tensor.device() != place.device() || tensor.is_conj() || tensor.is_neg()) {
    return false;
  }
  const auto from = real_type(tensor.scalar_type());
  const auto to = real_type(place.scalar_type());
  return from && to && from->count == to->count && place.is_non_overlapping_and_dense() && same_order(tensor, place);
}

void flatten(Device& device, const at::Tensor& flat, const std::vector<PlacedTensor>& tensors, double scale) {
  if (tensors.empty()) return;
  const FlatCopy copy = describe(flat, tensors);
  device.flatten(copy.flat, copy.flat_type, copy.pieces, copy.piece_type, scale, handle_of(flat.device()));
  flat.unsafeGetTensorImpl()->bump_version();
}

void unflatten(Device& device, const at::Tensor& flat, const std::vector<PlacedTensor>& tensors, double scale) {
  if (tensors.empty()) return;
  const FlatCopy copy = describe(flat, tensors);
  device.unflatten(copy.flat, copy.flat_type, copy.pieces, copy.piece_type, scale, handle_of(flat.device()));
  for (const PlacedTensor& placed : tensors) placed.tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace ours
