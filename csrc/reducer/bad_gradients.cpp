#include "reducer/bad_gradients.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <cmath>

#include "reducer/group_reductions.h"

namespace ours {
namespace {

/// The most parameters of a rank that a message names.
constexpr size_t kMostNamed = 8;

at::Tensor real_values(const at::Tensor& tensor) {
  const at::Tensor values = tensor.is_sparse() ? tensor._values() : tensor;
  return values.is_complex() ? at::view_as_real(values) : values;
}

/// Reads a tensor on the CPU once, several times as fast as a copy: a NaN is both the least and the greatest value.
bool is_finite(const at::Tensor& tensor) {
  const at::Tensor values = real_values(tensor);
  if (values.numel() == 0) return true;
  const auto [least, greatest] = at::aminmax(values);
  return std::isfinite(least.item<double>()) && std::isfinite(greatest.item<double>());
}

at::Tensor is_bad_on_device(const at::Tensor& tensor) { return at::isfinite(real_values(tensor)).all().logical_not(); }

/// What a slot's gradient is reduced in.
const at::Tensor& gradient_in(const Bucket& bucket, const GradientSlot& slot) {
  if (bucket.sparse()) return bucket.buffer();
  return slot.in_place.defined() ? slot.in_place : slot.view;
}

}  // namespace

void BadGradients::forget() {
  std::fill(own_.begin(), own_.end(), 0);
  averages_ = false;
  gradient_looks_.clear();
  average_looks_.clear();
}

void BadGradients::look_at_gradients(const Bucket& bucket) {
  if (!enabled()) return;
  if (device_.is_cpu()) {
    const std::vector<at::Tensor> pieces = bucket.pieces_to_reduce();
    if (std::all_of(pieces.begin(), pieces.end(), is_finite)) return;
  }
  for (const GradientSlot& slot : bucket.slots()) {
    const at::Tensor& gradient = gradient_in(bucket, slot);
    if (!device_.is_cpu()) {
      gradient_looks_.push_back({slot.parameter_index, is_bad_on_device(gradient)});
    } else if (!is_finite(gradient)) {
      own_[slot.parameter_index] = 1;
    }
  }
}

void BadGradients::look_at_averages(const Bucket& bucket, bool by_hook) {
  if (!enabled()) return;
  std::vector<at::Tensor> pieces;
  if (by_hook && !bucket.sparse()) {
    for (const GradientSlot& slot : bucket.slots()) pieces.push_back(slot.result);
  } else {
    pieces = bucket.pieces_to_reduce();
  }
  for (const at::Tensor& piece : pieces) {
    if (device_.is_cpu()) {
      averages_ = averages_ || !is_finite(piece);
    } else {
      average_looks_.push_back(is_bad_on_device(piece));
    }
  }
}

void BadGradients::settle_looks() {
  if (!gradient_looks_.empty()) {
    std::vector<at::Tensor> all;
    for (const Look& look : gradient_looks_) all.push_back(look.bad);
    const at::Tensor bad = at::stack(all).cpu();
    for (size_t i = 0; i < all.size(); ++i) own_[gradient_looks_[i].index] = bad.const_data_ptr<bool>()[i] ? 1 : 0;
  }
  if (!average_looks_.empty()) averages_ = at::stack(average_looks_).any().item<bool>();
}

bool BadGradients::is_own() const {
  return std::any_of(own_.begin(), own_.end(), [](uint8_t bad) { return bad != 0; });
}

bool BadGradients::react(c10d::ProcessGroup& group, int64_t backward) {
  if (!enabled()) return false;
  settle_looks();
  std::string found = agree(group);
  // All ranks would say the same.
  const bool tells = is_own() || group.getRank() == 0;
  forget();
  if (found.empty()) return false;
  found = "NaN or infinite values in the gradients of backward " + std::to_string(backward) + ": " + found;
  if (options_.bad_gradients == "raise") errors_.raise(found, ". All ranks raise this error.");
  const bool skips = options_.bad_gradients == "skip";
  if (tells) TORCH_WARN(found, skips ? ". All ranks skip the step: their gradients are None." : ".");
  return skips;
}

std::string BadGradients::agree(c10d::ProcessGroup& group) const {
  const std::vector<int> found{is_own() ? 1 : 0, averages_ ? 1 : 0};
  const at::Tensor ranks = at::tensor(found, at::kInt).to(device_);
  start_all_reduce(group, {ranks}, c10d::ReduceOp::SUM)->wait();
  const at::Tensor sums = ranks.cpu();
  const auto* const counts = sums.const_data_ptr<int>();
  if (counts[0] > 0) return describe(group);
  if (counts[1] == 0) return "";
  return "those of all ranks were finite, but the averages are not, because sums of a half type, or what a "
         "communication hook made of them, were out of range";
}

std::string BadGradients::describe(c10d::ProcessGroup& group) const {
  const std::vector<at::Tensor> all = gather(group, at::tensor(own_, at::kByte).to(device_));
  std::string text;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const at::Tensor bad = all[rank].cpu();
    std::string names;
    size_t parameters = 0;
    for (size_t index = 0; index < own_.size(); ++index) {
      if (bad.const_data_ptr<uint8_t>()[index] == 0 || ++parameters > kMostNamed) continue;
      names += (names.empty() ? "" : ", ") + options_.name_of(index);
    }
    if (parameters == 0) continue;
    if (parameters > kMostNamed) names += " and " + std::to_string(parameters - kMostNamed) + " more";
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank) + " in " + names;
  }
  return text;
}

}  // namespace ours
