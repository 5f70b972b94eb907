#include "reducer/gradient_ownership.h"

namespace ours {

bool is_owned_by_parameter(const at::Tensor& gradient, const at::Tensor& incoming) {
  // A gradient with a graph of its own is part of later computations.
  if (gradient.requires_grad()) return false;
  size_t tensors = 1;        // those that refer to the gradient's memory
  size_t gradient_uses = 1;  // the parameter
  if (incoming.defined() && incoming.has_storage() && incoming.is_alias_of(gradient)) {
    // A gradient may come as a view, as that of a transposed weight does; then the view holds its base.
    if (incoming.is_view()) {
      if (incoming._base().use_count() != 1) return false;
      ++tensors;
    }
    if (incoming.is_same(gradient)) {
      ++gradient_uses;
    } else {
      if (incoming.use_count() != 1) return false;
      ++tensors;
    }
  }
  return gradient.use_count() == gradient_uses && gradient.storage().use_count() == tensors;
}

}  // namespace ours
