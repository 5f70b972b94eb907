#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/select.h"
#include "collectives/tcp/tcp_run.h"

// The algorithms for ranks that only share a network, each explained in the file of the same name.

namespace ours::tcp {

/// all_reduce and reduce, and reduce_scatter, by the algorithm that the table gives. tcp_reduce.cpp
void reduce(TcpRun& run, const Selection& selection, const Reducing& job);
void reduce_scatter(TcpRun& run, const Selection& selection, const Scattering& job);

/// An array in as many slices as there are ranks; each rank reduces one of them.
struct Slices {
  DType dtype;
  Reduction reduction;
  std::vector<const std::byte*> inputs;  ///< this rank's input of each slice
  std::vector<size_t> counts;            ///< elements of each slice
  std::vector<std::byte*> outputs;       ///< where each reduced slice goes; null: nowhere but its reducer
  std::vector<int> readers;              ///< which ranks want all slices
};

/// Uses messages between all ranks. tcp_reduce_direct.cpp
void reduce_direct(TcpRun& run, const Slices& job);
/// Uses messages between neighbours only. tcp_reduce_ring.cpp
void reduce_ring(TcpRun& run, const Slices& job);

/// tcp_broadcast.cpp
void broadcast(TcpRun& run, const ExchangePlan& plan);
/// Around a ring. tcp_all_gather.cpp
void all_gather(TcpRun& run, const ExchangePlan& plan);
/// Implements all collectives that move data unchanged, by messages between all ranks. tcp_exchange.cpp
void exchange(TcpRun& run, const ExchangePlan& plan);

/// The `number`-th monitored barrier of the mesh. tcp_monitored_barrier.cpp
void monitored_barrier(TcpMesh& mesh, const Call& call, uint64_t number, bool wait_all_ranks);

}  // namespace ours::tcp
