#pragma once

#include <cstddef>

namespace ours {

struct ConstSpan {
  const void* data = nullptr;
  size_t bytes = 0;
};

struct Span {
  void* data = nullptr;
  size_t bytes = 0;
};

}  // namespace ours
