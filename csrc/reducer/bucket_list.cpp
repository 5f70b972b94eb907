#include "reducer/bucket_list.h"

#include <utility>

namespace ours {

void BucketList::assign(const Buckets& indices, std::optional<at::ScalarType> reduce_dtype) {
  buckets_.clear();
  auto layout = std::make_shared<BucketLayout>();
  for (const auto& parameters : indices) {
    for (size_t slot = 0; slot < parameters.size(); ++slot) places_[parameters[slot]] = {buckets_.size(), slot};
    const Bucket& bucket =
        buckets_.emplace_back(parameters, parameters_, options_.is_sparse(parameters.front()), reduce_dtype);
    layout->parameters.push_back(parameters);
    layout->bytes.push_back(bucket.bytes());
  }
  layout_ = std::move(layout);
}

std::vector<BucketTimes> BucketList::times() const {
  std::vector<BucketTimes> times;
  for (const Bucket& bucket : buckets_) times.push_back(bucket.times);
  return times;
}

std::vector<c10d::GradBucket> BucketList::zeros() const {
  std::vector<c10d::GradBucket> zeros;
  for (size_t index = 0; index < buckets_.size(); ++index) {
    zeros.push_back(buckets_[index].grad_bucket(index, buckets_.size(), buckets_[index].zeros_to_reduce()));
  }
  return zeros;
}

}  // namespace ours
