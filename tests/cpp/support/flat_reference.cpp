#include "support/flat_reference.h"

#include <cstring>
#include <vector>

#include "kernels/convert.h"

namespace ours::testing {
namespace {

template <class T>
T element(const void* array, size_t i) {
  T x;
  std::memcpy(&x, static_cast<const char*>(array) + i * sizeof(T), sizeof(T));
  return x;
}

std::vector<float> as_floats(const void* from, DType type, size_t count) {
  std::vector<float> values(count);
  if (type == DType::Float32) {
    std::memcpy(values.data(), from, count * sizeof(float));
  } else if (type == DType::Float64) {
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(element<double>(from, i));
  } else {
    widen(values.data(), from, type, count);
  }
  return values;
}

std::vector<double> as_doubles(const void* from, DType type, size_t count) {
  std::vector<double> values(count);
  if (type == DType::Float64) {
    std::memcpy(values.data(), from, count * sizeof(double));
    return values;
  }
  const std::vector<float> floats = as_floats(from, type, count);
  values.assign(floats.begin(), floats.end());
  return values;
}

void store(void* to, DType type, const std::vector<float>& values) {
  if (type == DType::Float32) {
    std::memcpy(to, values.data(), values.size() * sizeof(float));
  } else {
    narrow(to, values.data(), type, values.size());
  }
}

}  // namespace

void convert_scaled(void* to, DType to_type, const void* from, DType from_type, size_t count, double scale) {
  if (count == 0) return;
  if (to_type == DType::Float64 || from_type == DType::Float64) {
    std::vector<double> values = as_doubles(from, from_type, count);
    for (double& x : values) x *= scale;
    if (to_type == DType::Float64) {
      std::memcpy(to, values.data(), count * sizeof(double));
    } else {
      store(to, to_type, std::vector<float>(values.begin(), values.end()));
    }
  } else {
    std::vector<float> values = as_floats(from, from_type, count);
    for (float& x : values) x *= static_cast<float>(scale);
    store(to, to_type, values);
  }
}

}  // namespace ours::testing
