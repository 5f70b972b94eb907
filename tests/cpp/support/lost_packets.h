#pragma once

#include <linux/filter.h>
#include <sys/socket.h>

#include "support/testing.h"

namespace ours::testing {

/// Loses all packets that come to a socket, as a link does that is down, until the filter is detached.
inline void lose_packets(int fd) {
  sock_filter drop{BPF_RET | BPF_K, 0, 0, 0};
  const sock_fprog program{1, &drop};
  CHECK_EQ(::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)), 0);
}

}  // namespace ours::testing
