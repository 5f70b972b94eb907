#include "reducer/weights.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <utility>

#include "reducer/group_reductions.h"
#include "reducer/weight_digits.h"

namespace ours {
namespace {

constexpr int kDoubleBits = 53;

/// The significant bits that sums of this type keep between all ranks; 0 if they are not suitable. Complex numbers are
/// pairs of reals.
int significant_bits(at::ScalarType type) {
  switch (c10::toRealValueType(type)) {
    case at::kDouble:
      return kDoubleBits;
    case at::kFloat:  // may travel as a half type, of which bfloat16 has the fewest
      return 8;
    case at::kHalf:
      return 11;
    case at::kBFloat16:
      return 8;
    default:
      return 0;
  }
}

}  // namespace

void Weights::set(double weight) {
  TORCH_CHECK_VALUE(weight == 0 || (weight >= kLeastWeight && weight <= kMostWeight), "A weight of ", weight,
                    " cannot be added up over ranks: it must be 0, or a number from 2**-32 to 2**63. Multiply the loss "
                    "and the weights of all ranks by the same factor.");
  own_ = weight;
}

void Weights::forget() {
  own_.reset();
  work_.reset();
  alone_.reset();
  failure_ = nullptr;
}

void Weights::choose_carrier(BucketList& buckets, int ranks, bool may_ride) {
  carrier_.reset();
  if (!in_use_ || !may_ride) return;
  int most = 0;
  for (size_t index = 0; index < buckets.size(); ++index) {
    const int bits = buckets[index].sparse() ? 0 : significant_bits(buckets[index].dtype());
    if (bits <= most || !WeightDigits(bits, ranks).possible()) continue;
    most = bits;
    carrier_ = index;
  }
  if (carrier_) buckets[*carrier_].set_tail(WeightDigits(most, ranks).size());
}

void Weights::write(const Bucket& carrier, int ranks) const {
  const WeightDigits digits(significant_bits(carrier.dtype()), ranks);
  carrier.tail().copy_(at::tensor(digits.encode(own_), at::kDouble));
}

void Weights::read(const Bucket& carrier, int ranks) { take(carrier.tail(), significant_bits(carrier.dtype()), ranks); }

void Weights::start_alone(c10d::ProcessGroup& group, at::Device device) {
  if (!is_alone()) return;
  alone_ = at::tensor(WeightDigits(kDoubleBits, group.getSize()).encode(own_), at::kDouble).to(device);
  work_ = start_all_reduce(group, {alone_}, c10d::ReduceOp::SUM);
}

void Weights::join_alone(c10d::ProcessGroup& group, at::Device device) {
  if (!is_alone()) return;
  const int64_t numbers = WeightDigits(kDoubleBits, group.getSize()).size();
  alone_ = at::zeros({numbers}, at::dtype(at::kDouble).device(device));
  start_all_reduce(group, {alone_}, c10d::ReduceOp::SUM)->wait();
  take(alone_, kDoubleBits, group.getSize());
}

void Weights::finish_alone(int ranks) {
  if (const auto work = std::exchange(work_, nullptr)) {
    try {
      await(*work);
      take(alone_, kDoubleBits, ranks);
    } catch (const std::exception&) {
      failure_ = std::current_exception();
    }
  }
  if (failure_) std::rethrow_exception(failure_);
}

void Weights::await(c10d::Work& work) const {
  try {
    work.wait();
  } catch (c10::Error& error) {
    if (in_use_ && !added_up_) {
      error.add_context(
          "This was the first reduction with weights. If set_weight() was called on some ranks only, call it on all.");
    }
    throw;
  }
}

void Weights::take(const at::Tensor& sums, int significant_bits, int ranks) {
  const at::Tensor numbers = sums.to(at::kCPU, at::kDouble);
  const auto* first = numbers.const_data_ptr<double>();
  const WeightSum sum = WeightDigits(significant_bits, ranks).decode({first, first + numbers.numel()});
  total_ = sum.total;
  added_up_ = true;
  TORCH_CHECK(sum.with == 0 || sum.without == 0, "set_weight() was called on ", sum.with, " of ",
              sum.with + sum.without, " ranks before this backward, and ", own_ ? "" : "not ",
              "on this one. Call it before each backward that reduces gradients on all ranks or on none; a rank "
              "without samples has the weight 0.");
}

double Weights::factor(int divisor) const {
  if (!own_) return 1.0 / divisor;
  // Nobody has a sample: there is no mean, and nothing to learn.
  return total_ > 0 ? 1.0 / total_ : 0.0;
}

}  // namespace ours
