#include "common/descriptors.h"

#include "common/error.h"
#include "common/shared_memory.h"
#include "support/children.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(the_soft_limit_of_descriptors_is_raised_where_more_are_needed) {
  const auto soft_limit = [] {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    return limit.rlim_cur;
  };
  CHECK(in_child([&] {
    limit_descriptors(200, 400);
    want_descriptors(10);
    if (soft_limit() != 200) return false;
    want_descriptors(200);
    return soft_limit() == 400;
  }));
  CHECK(in_child([&] {
    limit_descriptors(64, 128);
    use_up_descriptors();
    return with_descriptors(open_null) == 64 && soft_limit() == 128;
  }));
}

TEST(a_lack_of_descriptors_is_told_with_the_limit) {
  CHECK(in_child([] {
    limit_descriptors(64, 64);
    use_up_descriptors();
    const std::string text = CHECK_THROWS(SystemError, SharedMemory::create(4096));
    return text.find("Too many open files") != std::string::npos && text.find("its limit is 64") != std::string::npos &&
           text.find("ulimit -Hn") != std::string::npos;
  }));
}

}  // namespace
}  // namespace ours::testing
