#include "common/error.h"
#include "support/node_ranks.h"

namespace ours {
namespace {

TEST(a_group_that_takes_more_memory_than_there_is_is_refused_before_any_is_taken) {
  const NodeConfig config{size_t{1} << 40, 4096, 4096};
  CHECK_CONTAINS(CHECK_THROWS(Error, NodeSession::create(0, 4, config)), "Set OURS_CHUNK_BYTES to less");
}

}  // namespace
}  // namespace ours
