/*
 * The contestant of scripts/bench_io.py that a queue can be compared with: io_uring by plain system calls.
 *
 * bench_io_loop FILE read|write|mixed SPAN_BYTES REQUEST_BYTES DEPTH plain|registered
 *
 * Moves the whole span once, `mixed` by reading its first half while writing its second; keeps DEPTH
 * requests in flight in each direction; one thread, which waits in the kernel. Prints one line of JSON.
 * `registered` gives the kernel the file and the buffers beforehand. Setting up is not timed. Any
 * request that fails or is short ends the program: it measures, it does not recover.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define HUGE_PAGE_BYTES ((size_t)2 << 20)

struct ring {
	int fd;
	unsigned *submission_tail, *submission_mask, *submission_array;
	unsigned *completion_head, *completion_tail, *completion_mask;
	struct io_uring_sqe *entries;
	struct io_uring_cqe *completions;
};

/* One direction's part of the span, and how far it has come. */
struct lane {
	bool writes;
	uint64_t next, end;
};

/* The transfer of the span. Buffer i belongs to lane i / depth; `lengths` says what it moves. */
struct job {
	struct ring ring;
	struct lane lanes[2];
	int file;
	bool registered;
	char *buffers;
	uint64_t request_bytes, *lengths;
	unsigned depth, num_buffers, *idle, num_idle, in_flight;
};

static void die(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

static void *map_ring(int fd, size_t num_bytes, off_t offset)
{
	void *start = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
	if (start == MAP_FAILED)
		die("mmap of the ring");
	return start;
}

static struct ring open_ring(unsigned num_entries)
{
	struct io_uring_params params = {0};
	int fd = (int)syscall(SYS_io_uring_setup, num_entries, &params);
	if (fd < 0)
		die("io_uring_setup");
	size_t submission_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
	size_t completion_bytes = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
	char *submission = map_ring(fd, submission_bytes, IORING_OFF_SQ_RING);
	char *completion = map_ring(fd, completion_bytes, IORING_OFF_CQ_RING);
	return (struct ring){
		.fd = fd,
		.submission_tail = (unsigned *)(submission + params.sq_off.tail),
		.submission_mask = (unsigned *)(submission + params.sq_off.ring_mask),
		.submission_array = (unsigned *)(submission + params.sq_off.array),
		.completion_head = (unsigned *)(completion + params.cq_off.head),
		.completion_tail = (unsigned *)(completion + params.cq_off.tail),
		.completion_mask = (unsigned *)(completion + params.cq_off.ring_mask),
		.entries = map_ring(fd, params.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES),
		.completions = (struct io_uring_cqe *)(completion + params.cq_off.cqes),
	};
}

/* Huge pages, touched, with contents that no drive can compress away. */
static char *make_buffers(size_t num_bytes)
{
	char *start = mmap(NULL, num_bytes + HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (start == MAP_FAILED)
		die("mmap of the buffers");
	start += -(uintptr_t)start % HUGE_PAGE_BYTES;
	madvise(start, num_bytes, MADV_HUGEPAGE); /* if it fails: slower, and as correct */
	uint64_t state = 88172645463325252u;
	for (size_t i = 0; i < num_bytes / sizeof(state); i++) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		((uint64_t *)start)[i] = state;
	}
	return start;
}

static void *make_array(size_t num_elements, size_t element_bytes)
{
	void *array = calloc(num_elements, element_bytes);
	if (array == NULL)
		die("calloc");
	return array;
}

static void register_all(const struct job *job)
{
	struct iovec *vectors = make_array(job->num_buffers, sizeof(*vectors));
	for (unsigned i = 0; i < job->num_buffers; i++)
		vectors[i] = (struct iovec){
			.iov_base = job->buffers + i * job->request_bytes,
			.iov_len = job->request_bytes,
		};
	if (syscall(SYS_io_uring_register, job->ring.fd, IORING_REGISTER_BUFFERS, vectors, job->num_buffers) < 0)
		die("registering the buffers");
	if (syscall(SYS_io_uring_register, job->ring.fd, IORING_REGISTER_FILES, &job->file, 1) < 0)
		die("registering the file");
	free(vectors);
}

static double now_seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* User and system time of all threads, the kernel's own workers for this process among them. */
static double cpu_seconds(void)
{
	struct rusage usage;
	getrusage(RUSAGE_SELF, &usage);
	return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
	       1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

/* Fill the ring's next entry with the next request of the lane that owns the buffer. */
static void prepare(struct job *job, struct lane *lane, unsigned buffer, unsigned tail)
{
	uint64_t left = lane->end - lane->next;
	unsigned place = tail & *job->ring.submission_mask;
	uint8_t plain = lane->writes ? IORING_OP_WRITE : IORING_OP_READ;
	uint8_t fixed = lane->writes ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;

	job->lengths[buffer] = left < job->request_bytes ? left : job->request_bytes;
	job->ring.entries[place] = (struct io_uring_sqe){
		.opcode = job->registered ? fixed : plain,
		.flags = job->registered ? IOSQE_FIXED_FILE : 0,
		.fd = job->registered ? 0 : job->file,
		.off = lane->next,
		.addr = (uint64_t)(uintptr_t)(job->buffers + buffer * job->request_bytes),
		.len = (uint32_t)job->lengths[buffer],
		.buf_index = (uint16_t)(job->registered ? buffer : 0),
		.user_data = buffer,
	};
	job->ring.submission_array[place] = place;
	lane->next += job->lengths[buffer];
}

/* Give every idle buffer a request, as far as its lane has any; hand them in, and wait for a completion. */
static void submit_and_wait(struct job *job)
{
	unsigned first = *job->ring.submission_tail, tail = first, num_kept = 0;
	for (unsigned i = 0; i < job->num_idle; i++) {
		unsigned buffer = job->idle[i];
		struct lane *lane = &job->lanes[buffer / job->depth];
		if (lane->next < lane->end)
			prepare(job, lane, buffer, tail++);
		else
			job->idle[num_kept++] = buffer;
	}
	job->num_idle = num_kept;
	job->in_flight += tail - first;
	if (job->in_flight == 0)
		return;
	__atomic_store_n(job->ring.submission_tail, tail, __ATOMIC_RELEASE);
	long taken = syscall(SYS_io_uring_enter, job->ring.fd, tail - first, 1, IORING_ENTER_GETEVENTS, NULL, 0);
	if (taken < 0)
		die("io_uring_enter");
	if (taken != (long)(tail - first)) {
		errno = EBUSY;
		die("io_uring_enter took too few requests");
	}
}

static void reap(struct job *job)
{
	unsigned head = *job->ring.completion_head;
	for (; head != __atomic_load_n(job->ring.completion_tail, __ATOMIC_ACQUIRE); head++) {
		struct io_uring_cqe *completion = &job->ring.completions[head & *job->ring.completion_mask];
		unsigned buffer = (unsigned)completion->user_data;
		if (completion->res < 0 || (uint64_t)completion->res != job->lengths[buffer]) {
			errno = completion->res < 0 ? -completion->res : EIO;
			die("a transfer");
		}
		job->idle[job->num_idle++] = buffer;
		job->in_flight--;
	}
	__atomic_store_n(job->ring.completion_head, head, __ATOMIC_RELEASE);
}

int main(int argc, char **argv)
{
	if (argc != 7) {
		fprintf(stderr, "usage: %s FILE read|write|mixed SPAN_BYTES REQUEST_BYTES DEPTH plain|registered\n", argv[0]);
		return 2;
	}
	bool mixed = strcmp(argv[2], "mixed") == 0;
	uint64_t span_bytes = strtoull(argv[3], NULL, 10);
	struct job job = {
		.lanes[0] = {.writes = strcmp(argv[2], "write") == 0, .end = mixed ? span_bytes / 2 : span_bytes},
		.lanes[1] = {.writes = true, .next = span_bytes / 2, .end = span_bytes},
		.file = open(argv[1], O_RDWR | O_DIRECT),
		.registered = strcmp(argv[6], "registered") == 0,
		.request_bytes = strtoull(argv[4], NULL, 10),
		.depth = (unsigned)strtoul(argv[5], NULL, 10),
	};
	if (job.file < 0)
		die(argv[1]);
	job.num_buffers = job.num_idle = job.depth * (mixed ? 2 : 1);
	job.ring = open_ring(job.num_buffers);
	job.buffers = make_buffers(job.num_buffers * job.request_bytes);
	job.lengths = make_array(job.num_buffers, sizeof(*job.lengths));
	job.idle = make_array(job.num_buffers, sizeof(*job.idle));
	for (unsigned i = 0; i < job.num_buffers; i++)
		job.idle[i] = i;
	if (job.registered)
		register_all(&job);

	double begin = now_seconds(), begin_cpu = cpu_seconds();
	submit_and_wait(&job);
	while (job.in_flight > 0) {
		reap(&job);
		submit_and_wait(&job);
	}
	double seconds = now_seconds() - begin, cpu = cpu_seconds() - begin_cpu;
	printf("{\"seconds\": %.9f, \"cpu_seconds\": %.6f}\n", seconds, cpu);
	return 0;
}
