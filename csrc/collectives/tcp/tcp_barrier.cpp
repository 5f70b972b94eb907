#include "collectives/tcp/tcp_group_impl.h"

// barrier: one dissemination (tcp_group_impl.h), which takes log2(size) messages a rank, one after another.

namespace ours {

void TcpGroup::do_barrier(const Running& run) {
  TcpCall tcp(*mesh_, facts_of(*mesh_, run));
  Dissemination all(tcp, rank(), size());
  tcp.run([&] { return all.advance(); });
}

}  // namespace ours
