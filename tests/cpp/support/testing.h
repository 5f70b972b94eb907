#pragma once

#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// A few macros instead of a test framework: TEST(name) { ... } defines a test, CHECK, CHECK_EQ and CHECK_THROWS end it
// with an exception when they fail. They may be used on any thread whose exceptions the test collects (see ranks.h).

namespace ours::testing {

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Test {
  std::string name;
  std::function<void()> body;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(const char* name, std::function<void()> body) { tests().push_back({name, std::move(body)}); }
};

template <class T, class = void>
struct IsPrintable : std::false_type {};
template <class T>
struct IsPrintable<T, std::void_t<decltype(std::declval<std::ostream&>() << std::declval<const T&>())>>
    : std::true_type {};

template <class T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else if constexpr (std::is_integral_v<T>) {
    out << +value;  // characters as numbers
  } else if constexpr (IsPrintable<T>::value) {
    out.precision(17);
    out << value;
  } else {
    out << "(a value of " << sizeof(T) << " bytes)";
  }
  return out.str();
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <class A, class B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (!(a == b)) fail(file, line, std::string(text) + ": " + show(a) + " != " + show(b));
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

inline void check_contains(const std::string& text, const std::string& part, const char* file, int line) {
  if (text.find(part) == std::string::npos) fail(file, line, "\"" + part + "\" is not in \"" + text + "\"");
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
