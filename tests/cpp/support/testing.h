#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

// A few macros instead of a test framework: TEST(name) { ... } defines a test, CHECK, CHECK_EQ and CHECK_THROWS end it
// with an exception when they fail. They may be used on any thread whose exceptions the test collects (see ranks.h).

namespace ours::testing {

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Registration {
  Registration(const char* name, void (*body)());
};

std::string show(double value);

template <class T>
std::string show(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<long long>(value));
  } else if constexpr (std::is_integral_v<T>) {
    return std::to_string(value);  // characters as numbers
  } else if constexpr (std::is_floating_point_v<T>) {
    return show(static_cast<double>(value));
  } else if constexpr (std::is_convertible_v<T, std::string_view>) {
    return std::string(std::string_view(value));
  } else {
    return "(a value of " + std::to_string(sizeof(T)) + " bytes)";
  }
}

[[noreturn]] void fail(const char* file, int line, const std::string& what);
[[noreturn]] void fail_equal(const char* text, const std::string& a, const std::string& b, const char* file, int line);
void check_contains(const std::string& text, const std::string& part, const char* file, int line);

template <class A, class B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  static_assert(!std::is_same_v<A, const char*>, "addresses would be compared; make it a std::string");
  if (!(a == b)) fail_equal(text, show(a), show(b), file, line);
}

/// Runs `body`; returns the message of the E that it throws. Fails if it throws something else or nothing.
template <class E>
std::string message_of(const std::function<void()>& body, const char* type, const char* file, int line) {
  try {
    body();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    fail(file, line, std::string("expected ") + type + ", caught: " + e.what());
  }
  fail(file, line, std::string("expected ") + type + ", nothing was thrown");
}

}  // namespace ours::testing

#define TEST(name)                                                                  \
  static void test_##name();                                                        \
  static const ours::testing::Registration registration_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                                                \
  do {                                                                                  \
    if (!(condition)) ours::testing::fail(__FILE__, __LINE__, "not true: " #condition); \
  } while (false)

#define CHECK_EQ(a, b) ours::testing::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)

/// CHECK_CONTAINS(text, part): `part` occurs in `text`.
#define CHECK_CONTAINS(text, part) ours::testing::check_contains((text), (part), __FILE__, __LINE__)

/// CHECK_THROWS(Type, statement): evaluates to the message of the exception.
#define CHECK_THROWS(Type, ...) ours::testing::message_of<Type>([&] { __VA_ARGS__; }, #Type, __FILE__, __LINE__)
