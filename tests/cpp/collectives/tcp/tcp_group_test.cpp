#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "common/network_interfaces.h"
#include "common/process_fd.h"
#include "support/children.h"
#include "support/tcp_ranks.h"
#include "transport/tcp/tcp_socket.h"

// Tests of groups over TCP beyond the contract of groups (group_contract_test.cpp).

namespace ours::testing {
namespace {

bool has_ipv6() {
  const auto all = interface_addresses();
  return std::any_of(all.begin(), all.end(), [](const auto& one) { return one.address.host() == "::1"; });
}

void check_sum(Group& group, uint64_t seq, size_t count = 5000) {
  std::vector<float> data(count, static_cast<float>(group.rank() + 1));
  const int ranks = group.size();
  sum(group, seq, data);
  for (const float x : data) CHECK_EQ(x, static_cast<float>(ranks * (ranks + 1) / 2));
}

TEST(ranks_meet_over_either_family_and_over_both) {
  std::vector<std::vector<std::string>> worlds = {{""}, {"127.0.0.1"}, {"lo"}};
  if (has_ipv6()) worlds.insert(worlds.end(), {{"::1"}, {"127.0.0.1", "::1", "lo"}});
  for (const auto& interfaces : worlds) {
    const auto keys = std::make_shared<MapKeys>();
    Meshes meshes;
    for (int r = 0; r < 3; ++r) {
      const auto& interface = interfaces[static_cast<size_t>(r) % interfaces.size()];
      meshes.push_back(join_mesh(r, 3, keys, loopback_config(interface)));
    }
    run_ranks(3, [&](int rank) {
      TcpGroup group(meshes[static_cast<size_t>(rank)]);
      check_sum(group, 0);
    });
    // One key for each rank, and one for the group.
    CHECK_EQ(keys->size(), size_t{4});
  }
}

TEST(ports_are_taken_from_the_range) {
  TcpConfig config = loopback_config();
  config.ports = PortRange{28500, 28699};
  const auto meshes = make_meshes(2, config);
  for (const auto& mesh : meshes) {
    CHECK(mesh->card().addresses[0].port() >= 28500 && mesh->card().addresses[0].port() <= 28699);
  }
  config.ports.first = config.ports.last = meshes[0]->card().addresses[0].port();
  const std::string message = CHECK_THROWS(Error, make_meshes(1, config));
  CHECK_CONTAINS(message, "OURS_PORT_RANGE");
  CHECK_CONTAINS(message, "127.0.0.1");
}

std::string congestion_of(const ProcessFd& fd) {
  char name[64] = {};
  socklen_t length = sizeof(name) - 1;
  CHECK_EQ(::getsockopt(fd.get(), IPPROTO_TCP, TCP_CONGESTION, name, &length), 0);
  return name;
}

/// Two ends of a connection over the loopback.
std::pair<ProcessFd, ProcessFd> connect_over_loopback(const std::string& congestion) {
  const ProcessFd listener = listen_at(*SocketAddress::parse("127.0.0.1"), PortRange{}, congestion);
  ProcessFd connected = begin_connecting(local_address(listener.get()), congestion);
  CHECK(connected.valid());
  ProcessFd accepted;
  const Deadline deadline = Deadline::after(std::chrono::seconds(10));
  while (!accepted.valid() && !deadline.passed()) accepted = accept_from(listener.get());
  return {std::move(connected), std::move(accepted)};
}

TEST(connections_have_the_congestion_control_that_was_asked_for) {
  const SocketAddress loopback = *SocketAddress::parse("127.0.0.1");
  const std::string usual = congestion_of(listen_at(loopback, PortRange{}));
  std::string chosen;
  std::ifstream allowed("/proc/sys/net/ipv4/tcp_allowed_congestion_control");
  while (chosen.empty() || chosen == usual) {
    if (!(allowed >> chosen)) chosen = usual;
    if (!allowed) break;
  }
  const auto [connected, accepted] = connect_over_loopback(chosen);
  CHECK_EQ(congestion_of(connected), chosen);
  CHECK_EQ(congestion_of(accepted), chosen);

  TcpConfig config = loopback_config();
  config.congestion = "no such";
  CHECK_CONTAINS(CHECK_THROWS(Error, make_meshes(1, config)), "OURS_TCP_CONGESTION='no such'");
}

TEST(bbr_is_for_long_round_trips_only) {
  using std::chrono::microseconds;
  using System = TcpCongestion::System;
  const auto choices = [](const std::string& asked, const System& system) {
    const TcpCongestion congestion(asked, system);
    return congestion.at_first() + ' ' + congestion.choose(microseconds(200)) + ' ' +
           congestion.choose(microseconds(20'000));
  };
  CHECK_EQ(choices("", {"bbr", "reno cubic bbr"}), "cubic cubic bbr");
  CHECK_EQ(choices("", {"bbr", "reno bbr"}), "reno reno bbr");
  CHECK_EQ(choices("", {"bbr2", "reno bbr2"}), "reno reno bbr2");
  // In turn: nothing else is allowed, the system has another, the user has chosen.
  CHECK_EQ(choices("", {"bbr", "bbr"}), "  ");
  CHECK_EQ(choices("", {"cubic", "reno cubic bbr"}), "  ");
  CHECK_EQ(choices("bbr", {"bbr", "reno cubic bbr"}), "bbr bbr bbr");
}

TEST(a_connection_gets_the_congestion_control_for_its_round_trip) {
  const TcpCongestion::System system{"bbr", "reno bbr"};
  const auto [one, other] = connect_over_loopback("");
  const std::string usual = congestion_of(one);
  // All peers are far at first; if the system has no bbr, the connections keep what they have.
  const TcpCongestion nobody_near("", system, std::chrono::microseconds(-1));
  CHECK(!nobody_near.settle(one.get()));
  CHECK(congestion_of(one) == "bbr" || congestion_of(one) == usual);
  // The shortest round trip of a loopback is far below a second, but on a busy machine not always below a millisecond.
  const TcpCongestion congestion("", system, std::chrono::seconds(1));
  for (const ProcessFd* end : {&one, &other}) {
    CHECK(congestion.settle(end->get()));
    CHECK_EQ(congestion_of(*end), std::string("reno"));
  }
  const TcpCongestion asked("reno", system);
  CHECK(asked.settle(one.get()));
}

TEST(connections_are_made_where_they_are_needed) {
  TcpConfig config = loopback_config();
  config.plan.rules = "all ring";
  const auto meshes = make_meshes(8, config);
  std::vector<size_t> connections(8);
  run_ranks(8, [&](int rank) {
    CHECK_EQ(meshes[static_cast<size_t>(rank)]->connections(), size_t{0});
    TcpGroup group(meshes[static_cast<size_t>(rank)]);
    check_sum(group, 0);
    check_sum(group, 1);
    connections[static_cast<size_t>(rank)] = meshes[static_cast<size_t>(rank)]->connections();
  });
  // One connection for control and one for data to each neighbour.
  for (const size_t count : connections) CHECK_EQ(count, size_t{4});
}

TEST(groups_of_one_process_do_not_mind_each_other) {
  std::vector<Meshes> rails;
  for (int rail = 0; rail < 3; ++rail) rails.push_back(make_meshes(2));
  run_ranks(6, [&](int thread) {
    TcpGroup group(rails[static_cast<size_t>(thread % 3)][static_cast<size_t>(thread / 3)]);
    for (uint64_t seq = 0; seq < 4; ++seq) check_sum(group, seq, 200000);
  });
}

TEST(a_monitored_barrier_may_be_called_beside_a_collective_that_hangs) {
  const auto meshes = make_meshes(2);
  TcpGroup first(meshes[0]);
  TcpGroup second(meshes[1]);
  run_ranks(3, [&](int thread) {
    const auto call = call_of(Op::MonitoredBarrier, DType::UInt8, 1);
    // Rank 0 waits in a barrier to which rank 1 comes only after the monitored one.
    if (thread == 0) barrier(first, 0);
    if (thread == 1) first.monitored_barrier(call, false);
    if (thread == 2) {
      second.monitored_barrier(call, false);
      barrier(second, 0);
    }
  });
}

TEST(a_forked_child_has_no_part_in_its_parents_group) {
  TcpGroup group(make_meshes(1)[0]);
  CHECK(in_child([&] {
    const std::string message = CHECK_THROWS(Error, barrier(group, 0));
    group.leave();
    return message.find("forked") != std::string::npos;
  }));
  barrier(group, 0);
}

TEST(a_forked_child_does_not_keep_its_parents_descriptors) {
  int data[2], stop[2];
  CHECK_EQ(::pipe(data), 0);
  CHECK_EQ(::pipe(stop), 0);
  ProcessFd reader(data[0]), writer(data[1]);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    ::close(stop[1]);
    // Lives until the parent has seen the end of its pipe.
    ::_exit(::read(stop[0], &byte, 1) == 0 ? 0 : 1);
  }
  ::close(stop[0]);
  writer.reset();
  char byte = 0;
  CHECK_EQ(::read(reader.get(), &byte, 1), ssize_t{0});
  ::close(stop[1]);
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

}  // namespace
}  // namespace ours::testing
