#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "reducer/bucket_assignment.h"

// Models with gradients of random sizes and kinds, for what must hold of any model.

namespace ours::testing {

struct RandomModel {
  std::vector<GradientInfo> gradients;
  std::vector<size_t> order;
  std::vector<int64_t> caps;
};

class RandomModels {
 public:
  int64_t number(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(engine_); }

  RandomModel next() {
    RandomModel model;
    for (int64_t left = number(0, 40); left > 0; --left) {
      model.gradients.push_back(
          {number(0, 5000), static_cast<int>(number(0, 2)), 0, static_cast<int>(number(-1, 1)), number(0, 3) == 0});
    }
    model.order.resize(model.gradients.size());
    std::iota(model.order.begin(), model.order.end(), size_t{0});
    std::shuffle(model.order.begin(), model.order.end(), engine_);
    for (int64_t left = number(1, 4); left > 0; --left) model.caps.push_back(number(1, 4000));
    return model;
  }

 private:
  std::mt19937_64 engine_{1};
};

}  // namespace ours::testing
