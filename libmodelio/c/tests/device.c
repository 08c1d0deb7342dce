/*
 * A queue writes a whole block device, syncs it, and reads it back in pieces of 64 KiB. tests/test_nbd_kernel.py runs it on a
 * device of the kernel's own NBD client.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <linux/fs.h>

#include "modelio.h"

#define PATIENCE 600000
#define PIECE 65536

static int failed(const char *what)
{
	fprintf(stderr, "%s: %s, %s\n", what, strerror(errno), modelio_error());
	return 1;
}

int main(int count, char **arguments)
{
	if (count != 3)
		return failed("give DEVICE and the number that each byte is to have");
	int device = open(arguments[1], O_RDWR | O_DIRECT);
	modelio_handle queue;
	uint64_t size;
	void *memory;
	if (device < 0 || ioctl(device, BLKGETSIZE64, &size) || posix_memalign(&memory, 4096, size))
		return failed(arguments[1]);
	memset(memory, atoi(arguments[2]), size);
	if (modelio_queue(NULL, &queue) || modelio_register(queue, memory, size))
		return failed("queue");
	int file = modelio_add_file(queue, device);
	struct modelio_request all[] = {
		{ .file = file, .op = MODELIO_WRITE, .data = memory, .size = size, .timeout_ms = PATIENCE },
		{ .file = file, .op = MODELIO_SYNC, .timeout_ms = PATIENCE },
	};
	struct modelio_completion ended[16];
	for (int at = 0; at < 2; at++)
		if (modelio_submit(queue, all + at, 1) != 1 || modelio_wait(queue, 1, ended, 1, PATIENCE) != 1 ||
		    ended[0].result != (at ? 0 : (int64_t)size))
			return failed(at ? "sync" : "write");
	memset(memory, 0, size);
	size_t pieces = size / PIECE, done = 0;
	for (size_t at = 0; at < pieces; at++) {
		struct modelio_request read = { .file = file, .op = MODELIO_READ, .data = (uint8_t *)memory + at * PIECE,
						.size = PIECE, .offset = at * PIECE, .timeout_ms = PATIENCE };
		if (modelio_submit(queue, &read, 1) != 1)
			return failed("submit");
	}
	while (done < pieces) {
		ssize_t found = modelio_wait(queue, 1, ended, 16, PATIENCE);
		if (found <= 0)
			return failed("wait");
		for (ssize_t at = 0; at < found; at++)
			if (ended[at].result != PIECE)
				return failed("read");
		done += found;
	}
	for (uint64_t at = 0; at < size; at++)
		if (((uint8_t *)memory)[at] != atoi(arguments[2]))
			return failed("the bytes are others");
	printf("%llu bytes, %zu pieces\n", (unsigned long long)size, pieces);
	return modelio_close(queue) ? failed("close") : 0;
}
