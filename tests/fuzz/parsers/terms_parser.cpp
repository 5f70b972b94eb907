#include "fuzz/parser.h"
#include "transport/tcp/tcp_wire.h"

// The terms that rank 0 sets for its group, as they are published in the store.

namespace ours::fuzz {
namespace {

std::vector<Seed> seeds() {
  TcpTerms terms;
  terms.secret = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  const Bytes usual = terms.text();
  terms.plan.streams = 16;
  terms.plan.chunk_bytes = 64;
  terms.plan.wire = WireType::Float16;
  return {{"usual", usual}, {"unusual", terms.text()}};
}

void parse(const Bytes& input) {
  const TcpTerms terms = TcpTerms::parse(input);
  require(terms.plan.streams >= 1 && terms.plan.streams <= 16, "there are a few streams");
  require(terms.plan.chunk_bytes >= 64 && terms.plan.chunk_bytes <= size_t{1} << 30, "chunks have a useful size");
  require(TcpTerms::parse(terms.text()).text() == terms.text(), "what was understood can be written");
}

const Registration registration("terms", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
