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
  for_many_models([](const RandomModel& model, const BucketAssignment& assigned) {
    std::vector<int> times(model.gradients.size(), 0);
    CHECK_EQ(assigned.caps.size(), assigned.buckets.size());
    for (const auto& bucket : assigned.buckets) {
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

TEST(buckets_close_at_their_cap_and_no_later) {
  for_many_models([](const RandomModel& model, const BucketAssignment& assigned) {
    std::map<Kind, int> below;
    for (size_t i = 0; i < assigned.buckets.size(); ++i) {
      const auto& bucket = assigned.buckets[i];
      const GradientInfo& last = model.gradients[bucket.back()];
      if (assigned.caps[i] == 0) {
        CHECK(last.sparse);
        continue;
      }
      int64_t bytes = 0;
      for (const size_t index : bucket) bytes += model.gradients[index].bytes;
      CHECK(bytes - last.bytes < assigned.caps[i]);
      // Only the last bucket of each kind may stay below its cap.
      CHECK_EQ(below[kind_of(last)], 0);
      if (bytes < assigned.caps[i]) ++below[kind_of(last)];
    }
  });
}

TEST(caps_are_used_in_turn_and_the_last_repeats) {
  for_many_models([](const RandomModel& model, const BucketAssignment& assigned) {
    std::map<Kind, size_t> turns;
    for (size_t i = 0; i < assigned.buckets.size(); ++i) {
      if (assigned.caps[i] == 0) continue;
      const size_t turn = turns[kind_of(model.gradients[assigned.buckets[i].front()])]++;
      CHECK_EQ(assigned.caps[i], model.caps[std::min(turn, model.caps.size() - 1)]);
    }
  });
}

TEST(gradients_keep_the_given_order) {
  for_many_models([](const RandomModel& model, const BucketAssignment& assigned) {
    std::vector<size_t> position(model.order.size());
    for (size_t place = 0; place < model.order.size(); ++place) position[model.order[place]] = place;
    for (const auto& bucket : assigned.buckets) {
      CHECK(
          std::is_sorted(bucket.begin(), bucket.end(), [&](size_t a, size_t b) { return position[a] < position[b]; }));
    }
  });
}

TEST(without_an_order_buckets_follow_their_first_gradient) {
  RandomModels models;
  for (int i = 0; i < kModels; ++i) {
    const RandomModel model = models.next();
    const auto buckets = assign_buckets(model.gradients, model.caps, {}).buckets;
    for (const auto& bucket : buckets) CHECK(std::is_sorted(bucket.begin(), bucket.end()));
    CHECK(std::is_sorted(buckets.begin(), buckets.end(),
                         [](const auto& a, const auto& b) { return a.front() < b.front(); }));
  }
}

TEST(buckets_survive_the_way_to_other_ranks) {
  for_many_models([](const RandomModel& model, const BucketAssignment& assigned) {
    const size_t count = model.gradients.size();
    const auto code = encode_buckets(assigned.buckets, count);
    CHECK_EQ(code.size(), 1 + 2 * count);
    CHECK(decode_buckets(code, count) == assigned.buckets);
  });
}

TEST(the_first_bucket_may_be_small) {
  const auto assigned = assign_buckets(std::vector<GradientInfo>(6, {600}), {1000, 2000}, {5, 4, 3, 2, 1, 0});
  CHECK(assigned.buckets == (std::vector<std::vector<size_t>>{{5, 4}, {3, 2, 1, 0}}));
  CHECK(assigned.caps == (std::vector<int64_t>{1000, 2000}));
}

TEST(damaged_buckets_are_refused) {
  const std::vector<std::vector<int64_t>> codes{
      {1, 2, 0, 0, 0}, {1, 1, 0, 0, 1}, {3, 1, 1, 0, 1}, {-1, 0, 0, 0, 0}, {0}, {1, 9, 9, 9, 9}};
  for (const auto& code : codes) CHECK_THROWS(InvalidArgument, decode_buckets(code, 2));
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, decode_buckets({1, 9, 9}, 1)), "bucket order");
}

TEST(a_wrong_order_is_refused) {
  const std::vector<GradientInfo> two(2, {1});
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, assign_buckets(two, {10}, {1, 1})), "occurs twice");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, assign_buckets(two, {10}, {0, 2})), "does not exist");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, assign_buckets(two, {}, {})), "at least one bucket size");
}

}  // namespace
}  // namespace ours::testing
