// A ring of io_uring by system calls: requests in, completions out.
//
// The Python package liburing (2026.3.30) offers the same calls. Its wheel is compiled for AVX-512 (the first call runs
// `vmovups %zmm0`), so it ends the process on AMD before Zen 4 and on Intel's desktop processors from the 12th generation
// on; and it holds the GIL while the kernel works.
//
// Invariants: one thread at a time prepares, submits and reaps, which is the caller's duty, so the kernel is the only
// one that entries are ordered against; an entry is handed over after it is whole, and a completion is read before its
// place is given back. The memory of a request must live until its completion.

#include "ring.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#define RATEL_HAS_RING 1
#else
#define RATEL_HAS_RING 0
#endif

#if RATEL_HAS_RING
#include <linux/io_uring.h>
#include <linux/time_types.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace nb = nanobind;

namespace ratel {

namespace {

[[noreturn]] void raise_os_error(int number) {
  errno = number;
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

#if RATEL_HAS_RING

// io_uring_enter may ask to be called again. This often in a row is a fault.
constexpr int kMostCalls = 1000;

template <class T>
T* at(void* base, uint32_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

class Ring {
 public:
  explicit Ring(uint32_t num_entries) {
    try {
      open(num_entries);
    } catch (...) {
      close();
      throw;
    }
  }

  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  ~Ring() { close(); }

  void prepare(bool writes, int fd, nb::handle memory, uint64_t offset, uint64_t key) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(memory.ptr(), &buffer, writes ? PyBUF_SIMPLE : PyBUF_WRITABLE) != 0) {
      throw nb::python_error();
    }
    const auto address = reinterpret_cast<uint64_t>(buffer.buf);
    const Py_ssize_t num_bytes = buffer.len;
    PyBuffer_Release(&buffer);
    if (num_bytes > std::numeric_limits<int32_t>::max()) {
      throw std::invalid_argument("memory: a request moves less than 2 GiB");
    }
    io_uring_sqe& entry = next_entry();
    entry.opcode = writes ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = fd;
    entry.addr = address;
    entry.len = static_cast<uint32_t>(num_bytes);
    entry.off = offset;
    entry.user_data = key;
    ++prepared_;
  }

  void prepare_timer(double seconds, uint64_t key) {
    if (!(seconds >= 0 && seconds < 1e9)) {
      throw std::invalid_argument("seconds: must be a number of seconds from 0 on");
    }
    const double whole = std::floor(seconds);
    timer_.tv_sec = static_cast<int64_t>(whole);
    timer_.tv_nsec = static_cast<long long>((seconds - whole) * 1e9);
    io_uring_sqe& entry = next_entry();
    entry.opcode = IORING_OP_TIMEOUT;
    entry.fd = -1;
    entry.addr = reinterpret_cast<uint64_t>(&timer_);
    entry.len = 1;
    entry.user_data = key;
    ++prepared_;
  }

  void submit() {
    check_open();
    __atomic_store_n(submitted_tail_, prepared_, __ATOMIC_RELEASE);
    int error = EBUSY;
    {
      nb::gil_scoped_release unlocked;
      for (int calls = 0; calls < kMostCalls; ++calls) {
        const uint32_t left = prepared_ - __atomic_load_n(submitted_head_, __ATOMIC_ACQUIRE);
        if (left == 0) {
          return;
        }
        if (enter(left, 0) < 0 && errno != EAGAIN && errno != EBUSY && errno != EINTR) {
          error = errno;
          break;
        }
      }
    }
    raise_os_error(error);
  }

  nb::list reap() {
    check_open();
    nb::list found;
    take_completions(found);
    // The kernel holds back what found no place, and signals nothing when it gets one.
    while (__atomic_load_n(submitted_flags_, __ATOMIC_RELAXED) & IORING_SQ_CQ_OVERFLOW) {
      {
        nb::gil_scoped_release unlocked;
        if (enter(0, IORING_ENTER_GETEVENTS) < 0) {
          break;
        }
      }
      take_completions(found);
    }
    return found;
  }

  void wait() {
    check_open();
    uint64_t count;
    ssize_t result;
    {
      nb::gil_scoped_release unlocked;
      do {
        result = read(event_, &count, sizeof count);
      } while (result < 0 && errno == EINTR);
    }
    if (result < 0) {
      raise_os_error(errno);
    }
  }

  void wake() {
    check_open();
    const uint64_t one = 1;
    if (write(event_, &one, sizeof one) < 0) {
      raise_os_error(errno);
    }
  }

  void close() {
    if (entries_ != nullptr) {
      munmap(entries_, entries_bytes_);
    }
    if (queues_ != nullptr) {
      munmap(queues_, queues_bytes_);
    }
    for (int fd : {ring_, event_}) {
      if (fd >= 0) {
        ::close(fd);
      }
    }
    entries_ = nullptr;
    queues_ = nullptr;
    ring_ = event_ = -1;
  }

 private:
  void open(uint32_t num_entries) {
    io_uring_params params;
    memset(&params, 0, sizeof params);
    ring_ = static_cast<int>(syscall(SYS_io_uring_setup, num_entries, &params));
    if (ring_ < 0) {
      raise_os_error(errno);
    }
    if (!(params.features & IORING_FEAT_RW_CUR_POS)) {  // Linux 5.6, as are reads and writes of plain memory
      raise_os_error(ENOSYS);
    }
    queues_bytes_ = std::max(params.sq_off.array + params.sq_entries * sizeof(uint32_t),
                             params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    queues_ = map(queues_bytes_, IORING_OFF_SQ_RING);
    entries_ = static_cast<io_uring_sqe*>(map(entries_bytes_, IORING_OFF_SQES));
    submitted_head_ = at<uint32_t>(queues_, params.sq_off.head);
    submitted_tail_ = at<uint32_t>(queues_, params.sq_off.tail);
    submitted_flags_ = at<uint32_t>(queues_, params.sq_off.flags);
    submitted_mask_ = *at<uint32_t>(queues_, params.sq_off.ring_mask);
    completed_head_ = at<uint32_t>(queues_, params.cq_off.head);
    completed_tail_ = at<uint32_t>(queues_, params.cq_off.tail);
    completed_mask_ = *at<uint32_t>(queues_, params.cq_off.ring_mask);
    completions_ = at<io_uring_cqe>(queues_, params.cq_off.cqes);
    uint32_t* order = at<uint32_t>(queues_, params.sq_off.array);
    for (uint32_t number = 0; number < params.sq_entries; ++number) {
      order[number] = number;
    }
    prepared_ = *submitted_tail_;
    event_ = eventfd(0, EFD_CLOEXEC);
    if (event_ < 0 || syscall(SYS_io_uring_register, ring_, IORING_REGISTER_EVENTFD, &event_, 1) != 0) {
      raise_os_error(errno);
    }
  }

  void* map(size_t num_bytes, off_t offset) {
    void* address = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, offset);
    if (address == MAP_FAILED) {
      raise_os_error(errno);
    }
    return address;
  }

  void check_open() const {
    if (ring_ < 0) {
      throw std::invalid_argument("the ring is closed");
    }
  }

  io_uring_sqe& next_entry() {
    check_open();
    if (prepared_ - __atomic_load_n(submitted_head_, __ATOMIC_ACQUIRE) > submitted_mask_) {
      throw std::out_of_range("the ring has no free entry: submit first");
    }
    io_uring_sqe& entry = entries_[prepared_ & submitted_mask_];
    memset(&entry, 0, sizeof entry);
    return entry;
  }

  void take_completions(nb::list& found) {
    uint32_t head = __atomic_load_n(completed_head_, __ATOMIC_RELAXED);
    const uint32_t tail = __atomic_load_n(completed_tail_, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head) {
      const io_uring_cqe& completion = completions_[head & completed_mask_];
      found.append(nb::make_tuple(static_cast<uint64_t>(completion.user_data), completion.res));
    }
    __atomic_store_n(completed_head_, head, __ATOMIC_RELEASE);
  }

  long enter(uint32_t num_submitted, uint32_t flags) {
    return syscall(SYS_io_uring_enter, ring_, num_submitted, 0, flags, nullptr, 0);
  }

  int ring_ = -1;
  int event_ = -1;
  void* queues_ = nullptr;
  size_t queues_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  size_t entries_bytes_ = 0;
  io_uring_cqe* completions_ = nullptr;
  uint32_t *submitted_head_ = nullptr, *submitted_tail_ = nullptr, *submitted_flags_ = nullptr;
  uint32_t *completed_head_ = nullptr, *completed_tail_ = nullptr;
  uint32_t submitted_mask_ = 0, completed_mask_ = 0;
  uint32_t prepared_ = 0;  // the tail after the entries that were prepared
  __kernel_timespec timer_ = {};
};

#else

// Where there is no io_uring, asking for a ring says so.
class Ring {
 public:
  explicit Ring(uint32_t) { raise_os_error(ENOSYS); }
  void prepare(bool, int, nb::handle, uint64_t, uint64_t) {}
  void prepare_timer(double, uint64_t) {}
  void submit() {}
  nb::list reap() { return {}; }
  void wait() {}
  void wake() {}
  void close() {}
};

#endif

}  // namespace

void define_ring(nb::module_& module) {
  nb::class_<Ring>(module, "Ring")
      .def(nb::init<uint32_t>(), nb::arg("num_entries"))
      .def("prepare", &Ring::prepare, nb::kw_only(), nb::arg("writes"), nb::arg("fd"), nb::arg("memory"),
           nb::arg("offset"), nb::arg("key"))
      .def("prepare_timer", &Ring::prepare_timer, nb::arg("seconds"), nb::arg("key"))
      .def("submit", &Ring::submit)
      .def("reap", &Ring::reap)
      .def("wait", &Ring::wait)
      .def("wake", &Ring::wake)
      .def("close", &Ring::close);
}

}  // namespace ratel
