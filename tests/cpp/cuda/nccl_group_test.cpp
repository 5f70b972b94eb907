#include "cuda/nccl_group.h"

#include <atomic>
#include <cstdint>
#include <thread>

#include "common/interrupts.h"
#include "support/device_ranks.h"
#include "support/patience.h"

// Tests of groups over NCCL beyond the contract of all groups: what is given to NCCL, and how failures end. Threads
// play NCCL.

namespace ours {
namespace {

using cuda::nccl_reduction_of;
using cuda::NcclGroup;
using cuda::NcclOp;
using cuda::NcclType;
using testing::call_of;
using testing::FakeNccl;
using testing::make_device;
using testing::message_of;

/// A rank and its parts.
struct Rank {
  std::shared_ptr<testing::StandInDevice> device;
  std::shared_ptr<FakeNccl> nccl;
  std::shared_ptr<NcclGroup> group;
};

std::vector<std::exception_ptr> run_ranks_catching(int ranks, const std::function<void(Rank&)>& fn) {
  const auto hosts = testing::node_kind("", Setting::Auto).make(ranks, 0);
  return testing::run_ranks_catching(ranks, [&](int rank) {
    Rank self;
    self.device = make_device(std::to_string(rank));
    self.nccl = std::make_shared<FakeNccl>(self.device, ranks);
    self.group = NcclGroup::make(self.nccl, hosts[static_cast<size_t>(rank)](), self.device,
                                 Deadline::after(std::chrono::seconds(60)));
    fn(self);
  });
}

void run_ranks(int ranks, const std::function<void(Rank&)>& fn) {
  const auto errors = run_ranks_catching(ranks, fn);
  for (const auto& error : errors) {
    if (error) throw testing::Failure(message_of(error));
  }
}

TEST(nccl_gets_the_reductions_that_mean_the_same) {
  const auto made = [](DType dtype, ReduceKind kind, int divisor = 4, double factor = 1.0) {
    return nccl_reduction_of(dtype, {kind, divisor, factor}, 4);
  };
  const auto sum = made(DType::BFloat16, ReduceKind::Sum);
  CHECK(sum && sum->type == NcclType::BFloat16 && sum->op == NcclOp::Sum && sum->units == 1);
  CHECK(!sum->factor && !sum->finish);
  const auto complex = made(DType::Complex128, ReduceKind::Avg);
  CHECK(complex && complex->type == NcclType::Float64 && complex->op == NcclOp::Avg && complex->units == 2);
  // With another divisor, or integers, the sum is divided here.
  const auto other = made(DType::Float32, ReduceKind::Avg, 3);
  CHECK(other && other->op == NcclOp::Sum && other->finish && other->finish->ranks == 3);
  const auto integer = made(DType::Int64, ReduceKind::Avg);
  CHECK(integer && integer->op == NcclOp::Sum && integer->finish->kind == ReduceKind::Avg);
  const auto premul = made(DType::Float16, ReduceKind::PremulSum, 4, 0.5);
  CHECK(premul && premul->op == NcclOp::Sum && *premul->factor == 0.5);
  const auto any = made(DType::Bool, ReduceKind::Sum);
  CHECK(any && any->type == NcclType::UInt8 && any->op == NcclOp::Max && any->finish);
  CHECK(made(DType::Bool, ReduceKind::Product)->op == NcclOp::Min);
  CHECK(made(DType::UInt8, ReduceKind::Max)->op == NcclOp::Max);

  CHECK(!made(DType::Int16, ReduceKind::Sum) && !made(DType::Float8E5M2, ReduceKind::Sum));
  CHECK(!made(DType::Int32, ReduceKind::BitXor) && !made(DType::Bool, ReduceKind::BitXor));
  CHECK(!made(DType::Complex64, ReduceKind::Product));
}

TEST(nccl_scales_by_an_operation_of_its_own_which_is_dropped) {
  run_ranks(2, [](Rank& self) {
    std::vector<double> values(300, 2);
    self.group->all_reduce(call_of(Op::AllReduce, DType::Float64, 1), values.data(), values.data(), values.size(),
                           {ReduceKind::PremulSum, 2, 0.1});
    CHECK(values == std::vector<double>(300, 2 * 0.1 + 2 * 0.1));
    CHECK_EQ(self.nccl->calls()["ncclRedOpCreatePreMulSum"], 1);
    CHECK_EQ(self.nccl->calls()["ncclRedOpDestroy"], 1);
  });
}

/// How often NCCL has been called in that way. Waits for the first time.
int calls_of(FakeNccl& nccl, const std::string& name) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(30));
  while (nccl.calls()[name] == 0 && !deadline.passed()) std::this_thread::yield();
  return nccl.calls()[name];
}

TEST(nccl_that_fails_on_one_rank_fails_on_all) {
  std::vector<std::shared_ptr<FakeNccl>> fakes(3);
  const auto errors = run_ranks_catching(3, [&](Rank& self) {
    fakes[static_cast<size_t>(self.group->rank())] = self.nccl;
    float x = 1;
    if (self.group->rank() == 1) self.nccl->fail("remote process exited or there was a network error");
    self.group->all_reduce(call_of(Op::AllReduce, DType::Float32, 1), &x, &x, 1, {ReduceKind::Sum, 3, 1.0});
    // A rank that had its result before the failure was found hears of it next.
    self.group->barrier(call_of(Op::Barrier, DType::UInt8, 2));
  });
  for (const auto& error : errors) CHECK_CONTAINS(message_of(error), "network error");
  for (const auto& fake : fakes) CHECK_EQ(calls_of(*fake, "ncclCommAbort"), 1);
}

/// One of two ranks in a sum of one number.
void sum_one(Rank& self) {
  float x = 1;
  self.group->all_reduce(call_of(Op::AllReduce, DType::Float32, 1), &x, &x, 1, {ReduceKind::Sum, 2, 1.0});
}

TEST(nccl_is_ended_in_an_orderly_way_or_aborted_and_left_behind_if_that_takes_long) {
  for (const bool fails : {true, false}) {
    const std::string end = fails ? "ncclCommAbort" : "ncclCommDestroy";
    run_ranks(2, [&](Rank& self) {
      const auto enough = std::make_shared<testing::StandInPoint>();
      self.nccl->before(end, [enough] { enough->wait(); });
      const auto began = Clock::now();
      if (fails) {
        self.nccl->fail("unhandled cuda error");
        CHECK_THROWS(Error, sum_one(self));
      } else {
        sum_one(self);
      }
      self.group.reset();
      CHECK(Clock::now() - began < std::chrono::seconds(30));
      CHECK_EQ(self.nccl->calls()[end], 0);
      enough->reach();
      CHECK_EQ(calls_of(*self.nccl, end), 1);
      CHECK_EQ(self.nccl->calls()["ncclCommFinalize"], fails ? 0 : 1);
      CHECK_EQ(self.nccl->calls()["ncclCommAbort"] + self.nccl->calls()["ncclCommDestroy"], 1);
    });
  }
}

// ---- enqueued

/// Enqueues a sum of one number behind what the default stream has.
NcclGroup::Enqueued enqueue_sum(Rank& self, float& x, const Call& call) {
  return self.group->enqueue(call, nullptr, [&, call] {
    self.group->all_reduce(call, &x, &x, 1, {ReduceKind::Sum, self.group->size(), 1.0});
  });
}

Call sum_call(uint64_t seq, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  return call_of(Op::AllReduce, DType::Float32, seq, timeout);
}

TEST(nccl_enqueues_without_waiting_for_device_or_peers) {
  std::atomic<bool> enqueued{false};
  run_ranks(2, [&](Rank& self) {
    float x = 1;
    if (self.group->rank() == 1) {
      while (!enqueued) std::this_thread::yield();
    }
    const auto stopped = self.device->stop(nullptr);
    const auto first = enqueue_sum(self, x, sum_call(1));
    const auto second = enqueue_sum(self, x, sum_call(2));
    enqueued = true;
    CHECK(!first.done->reached());
    stopped->reach();
    self.group->watch(sum_call(1), first);
    self.group->watch(sum_call(2), second);
    CHECK_EQ(x, 4);
    CHECK(second.done->reached());
  });
}

TEST(nccl_work_may_be_part_of_calls_with_different_names) {
  run_ranks(2, [](Rank& self) {
    float x = 1;
    const auto call = sum_call(1);
    const auto enqueued = self.group->enqueue(call, nullptr, [&] {
      if (self.group->rank() == 0) return self.group->all_reduce(call, &x, &x, 1, {});
      return self.group->all_reduce(call, {Span{&x, 4}}, {});
    });
    const Op name = self.group->rank() == 0 ? Op::AllReduce : Op::AllReduceCoalesced;
    self.group->watch(call_of(name, DType::Float32, 1), enqueued);
    CHECK_EQ(x, 2);
  });
}

TEST(nccl_refuses_reductions_that_it_does_not_have_and_goes_on) {
  run_ranks(2, [](Rank& self) {
    int16_t number = 1;
    const auto call = call_of(Op::AllReduce, DType::Int16, 1);
    const std::string message = CHECK_THROWS(InvalidArgument, self.group->enqueue(call, nullptr, [&] {
      self.group->all_reduce(call, &number, &number, 1, {ReduceKind::Sum, 2, 1.0});
    }));
    CHECK_CONTAINS(message, "NCCL does not have SUM of int16. Set OURS_DEVICE_ENGINE=ipc");
    float x = 1;
    self.group->watch(sum_call(2), enqueue_sum(self, x, sum_call(2)));
    CHECK_EQ(x, 2);
  });
}

TEST(nccl_group_whose_ranks_cut_an_array_differently_fails) {
  const auto errors = run_ranks_catching(2, [](Rank& self) {
    float x[4] = {};
    const size_t first = self.group->rank() == 0 ? 4 : 8;
    self.group->all_reduce(sum_call(1), {Span{x, first}, Span{&x[first / 4], 16 - first}}, {});
  });
  for (const auto& error : errors) CHECK_CONTAINS(message_of(error), "lists of tensors of the same sizes");
}

TEST(nccl_call_that_is_stuck_is_ended_by_an_abort_and_is_the_last) {
  for (const std::string stuck : {"ncclAllReduce", "ncclSend"}) {
    const auto errors = run_ranks_catching(2, [&](Rank& self) {
      if (self.group->rank() == 1) {
        while (self.group->failure().empty()) std::this_thread::yield();
        return;
      }
      testing::StandInPoint called, aborted;
      self.nccl->before(stuck, [&] {
        called.reach();
        aborted.wait();
      });
      self.nccl->before("ncclCommAbort", [&] { aborted.reach(); });
      std::thread aborter([&] {
        called.wait();
        self.group->abort("enough");
      });
      float x[2] = {};
      const auto call = call_of(stuck == "ncclSend" ? Op::AllToAll : Op::AllReduce, DType::Float32, 1);
      const std::vector<Span> out{{&x[0], 4}, {&x[1], 4}};
      const std::string message = CHECK_THROWS(AbortedError, self.group->enqueue(call, nullptr, [&] {
        if (stuck == "ncclSend") return self.group->all_to_all(call, {{&x[0], 4}, {&x[1], 4}}, out);
        return self.group->all_reduce(call, x, x, 1, {});
      }));
      aborter.join();
      CHECK_EQ(self.nccl->calls()["use after abort"], 0);
      CHECK_EQ(self.nccl->calls()["ncclRecv"], 0);
      throw Error(message);
    });
    CHECK_CONTAINS(message_of(errors[0]), "enough");
  }
}

TEST(nccl_group_of_calls_is_closed_if_an_abort_comes_in_between) {
  std::atomic<int> left_open{0};
  // The first abort may reach the other rank before it has made its group.
  run_ranks_catching(2, [&](Rank& self) {
    float x[2] = {};
    const auto call = call_of(Op::AllToAll, DType::Float32, 1);
    std::thread aborter;
    self.nccl->before("ncclSend", [&] {
      aborter = std::thread([&] { self.group->abort("enough"); });
      while (self.group->failure().empty()) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));  // less than for what is stuck
    });
    const std::vector<Span> out{{&x[0], 4}, {&x[1], 4}};
    try {
      self.group->enqueue(call, nullptr, [&] { self.group->all_to_all(call, {{&x[0], 4}, {&x[1], 4}}, out); });
    } catch (const Error&) {
      // Unless the abort comes after the last call.
    }
    if (aborter.joinable()) aborter.join();
    if (self.nccl->calls()["ncclGroupStart"] != self.nccl->calls()["ncclGroupEnd"]) ++left_open;
  });
  CHECK_EQ(left_open, 0);
}

TEST(nccl_that_takes_long_to_connect_hears_of_timeouts_and_signals) {
  for (const bool signal : {false, true}) {
    run_ranks(1, [&](Rank& self) {
      self.nccl->connect_when(std::make_shared<testing::StandInPoint>());
      if (signal)
        set_interrupt_check([] { return Interrupt{"KeyboardInterrupt", std::make_exception_ptr(Error("Ctrl-C"))}; });
      float x = 1;
      const auto call = sum_call(1, signal ? std::chrono::milliseconds(60000) : std::chrono::milliseconds(100));
      const std::string message = CHECK_THROWS(Error, enqueue_sum(self, x, call));
      set_interrupt_check(nullptr);
      CHECK_CONTAINS(message, signal ? "rank 0 was interrupted (KeyboardInterrupt) while NCCL began all_reduce"
                                     : "NCCL did not begin all_reduce number 1");
      if (signal) CHECK_THROWS(Error, throw_interrupt());
      CHECK_EQ(calls_of(*self.nccl, "ncclCommAbort"), 1);
    });
  }
}

TEST(nccl_graphs_end_with_an_abort_and_outlive_a_group_that_is_left) {
  enum { Aborted, Left, LeftWhileNcclIsBusy };
  for (const auto how : {Aborted, Left, LeftWhileNcclIsBusy}) {
    std::atomic<int> captured{0};
    run_ranks(2, [&](Rank& self) {
      const auto graph_is_gone = std::make_shared<testing::StandInPoint>();
      if (how == Left) self.nccl->before("ncclCommDestroy", [graph_is_gone] { graph_is_gone->wait(); });
      float x = 1;
      self.device->set_capturing(nullptr, true);
      enqueue_sum(self, x, sum_call(1));
      self.device->synchronize(self.group->stream());
      self.device->set_capturing(nullptr, false);
      // In a barrier of the group, a rank might hear of the other's abort.
      ++captured;
      while (captured < 2 && self.group->failure().empty()) std::this_thread::yield();
      if (how == Aborted) self.group->abort("enough");  // though nothing is under way
      // NCCL does not destroy a communicator that is not ready.
      if (how == LeftWhileNcclIsBusy) self.nccl->connect_when(std::make_shared<testing::StandInPoint>());
      const auto began = Clock::now();
      self.group.reset();
      CHECK(Clock::now() - began < std::chrono::seconds(20));
      if (how == Left) CHECK_EQ(self.nccl->calls()["ncclCommAbort"] + self.nccl->calls()["ncclCommDestroy"], 0);
      graph_is_gone->reach();
      CHECK_EQ(calls_of(*self.nccl, how == Left ? "ncclCommDestroy" : "ncclCommAbort"), 1);
      CHECK_EQ(self.nccl->calls()["ncclCommFinalize"], 0);
    });
  }
}

}  // namespace
}  // namespace ours
