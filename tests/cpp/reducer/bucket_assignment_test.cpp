#include "reducer/bucket_assignment.h"

#include <map>
#include <utility>

#include "common/error.h"
#include "reducer/random_models.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

using Kind = std::pair<int, int>;

constexpr int kModels = 300;

Kind kind_of(const GradientInfo& gradient) { return {gradient.dtype, gradient.device_index}; }

template <class Check>
void for_many_models(const Check& check) {
  RandomModels models;
  for (int i = 0; i < kModels; ++i) {
    const RandomModel model = models.next();
    check(model, assign_buckets(model.gradients, model.caps, model.order));
  }
}

TEST(every_gradient_is_in_one_bucket_of_its_own_kind) {
  for_many_models([](const RandomModel& model, const Buckets& buckets) {
    std::vector<int> times(model.gradients.size(), 0);
    for (const auto& bucket : buckets) {
      CHECK(!bucket.empty());
      for (const size_t index : bucket) {
        ++times[index];
        CHECK(kind_of(model.gradients[index]) == kind_of(model.gradients[bucket.front()]));
        CHECK(bucket.size() == 1 || !model.gradients[index].sparse);
      }
    }
    for (const int count : times) CHECK_EQ(count, 1);
  });
}

TEST(buckets_close_at_the_cap_of_their_turn_and_no_later) {
  for_many_models([](const RandomModel& model, const Buckets& buckets) {
    std::map<Kind, size_t> turns;
    std::map<Kind, int> below;
    for (const auto& bucket : buckets) {
      const GradientInfo& last = model.gradients[bucket.back()];
      if (last.sparse) continue;
      const int64_t cap = model.caps[std::min(turns[kind_of(last)]++, model.caps.size() - 1)];
      int64_t bytes = 0;
      for (const size_t index : bucket) bytes += model.gradients[index].bytes;
      CHECK(bytes - last.bytes < cap);
      // Only the last bucket of each kind may stay below its cap.
      CHECK_EQ(below[kind_of(last)], 0);
      if (bytes < cap) ++below[kind_of(last)];
    }
  });
}

TEST(gradients_keep_the_given_order) {
  for_many_models([](const RandomModel& model, const Buckets& buckets) {
    std::vector<size_t> position(model.order.size());
    for (size_t place = 0; place < model.order.size(); ++place) position[model.order[place]] = place;
    for (const auto& bucket : buckets) {
      CHECK(
          std::is_sorted(bucket.begin(), bucket.end(), [&](size_t a, size_t b) { return position[a] < position[b]; }));
    }
  });
}

TEST(without_an_order_buckets_follow_their_first_gradient) {
  RandomModels models;
  for (int i = 0; i < kModels; ++i) {
    const RandomModel model = models.next();
    const auto buckets = assign_buckets(model.gradients, model.caps, {});
    for (const auto& bucket : buckets) CHECK(std::is_sorted(bucket.begin(), bucket.end()));
    CHECK(std::is_sorted(buckets.begin(), buckets.end(),
                         [](const auto& a, const auto& b) { return a.front() < b.front(); }));
  }
}

TEST(the_first_bucket_may_be_small) {
  const auto buckets = assign_buckets(std::vector<GradientInfo>(6, {600}), {1000, 2000}, {5, 4, 3, 2, 1, 0});
  CHECK(buckets == (Buckets{{5, 4}, {3, 2, 1, 0}}));
}

TEST(a_wrong_order_is_refused) {
  const std::vector<GradientInfo> two(2, {1});
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, assign_buckets(two, {10}, {1, 1})), "occurs twice");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, assign_buckets(two, {10}, {0, 2})), "does not exist");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, assign_buckets(two, {10}, {1})), "2 expected");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, assign_buckets(two, {}, {})), "at least one bucket size");
}

}  // namespace
}  // namespace ours::testing
