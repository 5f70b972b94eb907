#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "reducer/bucket.h"
#include "reducer/overlap.h"
#include "reducer/reducer_options.h"

namespace ours {

/// The buckets of a model in the order in which they are reduced, and the place of each gradient among them.
class BucketList {
 public:
  BucketList(const std::vector<at::Tensor>& parameters, const ReducerOptions& options)
      : parameters_(parameters), options_(options), places_(parameters.size()) {}

  /// Replaces all buckets by new ones. Each parameter is in exactly one. With `reduce_dtype`, buckets are of that type
  /// instead of the parameters'.
  void assign(const Buckets& indices, std::optional<at::ScalarType> reduce_dtype);

  Bucket& bucket_of(size_t parameter) { return buckets_[places_[parameter].bucket]; }
  /// The place of a parameter's gradient among the slots of its bucket.
  size_t slot_of(size_t parameter) const { return places_[parameter].slot; }

  size_t size() const { return buckets_.size(); }
  Bucket& operator[](size_t index) { return buckets_[index]; }
  std::vector<Bucket>::iterator begin() { return buckets_.begin(); }
  std::vector<Bucket>::iterator end() { return buckets_.end(); }

  const std::shared_ptr<const BucketLayout>& layout() const { return layout_; }
  std::vector<BucketTimes> times() const;
  /// The buckets for communication hooks on a rank that has run out of input, all of zeros.
  std::vector<c10d::GradBucket> zeros() const;

 private:
  struct Place {
    size_t bucket = 0;
    size_t slot = 0;
  };

  const std::vector<at::Tensor>& parameters_;
  const ReducerOptions& options_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;  ///< by parameter
  std::shared_ptr<const BucketLayout> layout_;
};

}  // namespace ours
