// A kernel that holds multiprocessors of a GPU and does nothing, for tests of what a layer does beside one.
// Caller: Python, through cuda/host/extension.cc.
#pragma once

#include <cstdint>
#include <memory>

namespace jaxmoe {

// Holds them from its construction, when it has waited until the kernel runs, to its end.
class Occupant {
 public:
  // `blocks` multiprocessors of `device`, as the CUDA runtime counts devices, for `most_seconds` at most: after that
  // they are free, whether anyone lets go of them or not. Throws std::runtime_error where CUDA fails.
  Occupant(int device, int blocks, double most_seconds);
  ~Occupant();
  Occupant(const Occupant&) = delete;
  Occupant& operator=(const Occupant&) = delete;

  // Lets go of them; returns without waiting.
  void release();
  // Whether the kernel still held them when it was told to let go, so that all of the time between was beside it.
  bool held_to_the_end();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace jaxmoe
