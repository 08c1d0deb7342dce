/* One training step in C, with nothing but POSIX file calls.
 *
 *     step MODEL WAY
 *
 * Reads w (float32) from MODEL/weights and contributes 2 w + 1 to MODEL/gradients, so that with the reducer
 * `sum` the next version is 3 w + 1. WAY: read, pread, stdio, mmap, sendfile (which contributes w as it is).
 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

static void fail(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

static void compute(float *gradient, const float *weights, size_t bytes)
{
	for (size_t i = 0; i < bytes / sizeof(float); i++)
		gradient[i] = 2 * weights[i] + 1;
}

static void with_read(int from, int to, size_t bytes)
{
	char *buffer = malloc(bytes);
	size_t done = 0;
	for (ssize_t n; (n = read(from, buffer + done, bytes - done)) != 0; done += (size_t)n)
		if (n < 0)
			fail("read");
	compute((float *)buffer, (float *)buffer, bytes);
	done = 0;
	for (ssize_t n; done < bytes; done += (size_t)n)
		if ((n = write(to, buffer + done, bytes - done)) < 0)
			fail("write");
	free(buffer);
}

/* Pieces that fit no block, from the last one to the first. */
static void with_pread(int from, int to, size_t bytes)
{
	enum { PIECE = 40004 };
	static char piece[PIECE];
	for (size_t end = bytes; end > 0;) {
		size_t length = end % PIECE ? end % PIECE : PIECE;
		end -= length;
		if (pread(from, piece, length, (off_t)end) != (ssize_t)length)
			fail("pread");
		compute((float *)piece, (float *)piece, length);
		if (pwrite(to, piece, length, (off_t)end) != (ssize_t)length)
			fail("pwrite");
	}
}

static void with_mmap(int from, int to, size_t bytes)
{
	float *weights = mmap(NULL, bytes, PROT_READ, MAP_SHARED, from, 0);
	if (weights == MAP_FAILED)
		fail("mmap of weights");
	float *gradient = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, to, 0);
	if (gradient == MAP_FAILED)
		fail("mmap of gradients");
	compute(gradient, weights, bytes);
	if (fsync(to) != 0)
		fail("fsync");
	munmap(gradient, bytes);
	munmap(weights, bytes);
}

static void with_sendfile(int from, int to, size_t bytes)
{
	while (bytes > 0) {
		ssize_t n = sendfile(to, from, NULL, bytes);
		if (n <= 0)
			fail("sendfile");
		bytes -= (size_t)n;
	}
}

static void with_stdio(const char *weights, const char *gradients, size_t bytes)
{
	float *values = malloc(bytes);
	FILE *file = fopen(weights, "rb");
	if (!file || fread(values, 1, bytes, file) != bytes)
		fail(weights);
	fclose(file);
	compute(values, values, bytes);
	file = fopen(gradients, "wb");
	if (!file || fwrite(values, 1, bytes, file) != bytes)
		fail(gradients);
	if (fclose(file) != 0)
		fail("fclose");
	free(values);
}

int main(int argc, char **argv)
{
	char weights[4096], gradients[4096];
	if (argc != 3) {
		fprintf(stderr, "usage: step MODEL WAY\n");
		return 2;
	}
	const char *way = argv[2];
	snprintf(weights, sizeof weights, "%s/weights", argv[1]);
	snprintf(gradients, sizeof gradients, "%s/gradients", argv[1]);
	int from = open(weights, O_RDONLY);
	if (from < 0)
		fail(weights);
	struct stat status;
	if (fstat(from, &status) != 0)
		fail("fstat");
	size_t bytes = (size_t)status.st_size;
	if (strcmp(way, "stdio") == 0) {
		with_stdio(weights, gradients, bytes);
		return 0;
	}
	int to = open(gradients, strcmp(way, "mmap") == 0 ? O_RDWR : O_WRONLY);
	if (to < 0)
		fail(gradients);
	if (strcmp(way, "read") == 0)
		with_read(from, to, bytes);
	else if (strcmp(way, "pread") == 0)
		with_pread(from, to, bytes);
	else if (strcmp(way, "mmap") == 0)
		with_mmap(from, to, bytes);
	else if (strcmp(way, "sendfile") == 0)
		with_sendfile(from, to, bytes);
	else
		return 2;
	/* The end of the contribution: this is where a refusal is told. */
	if (close(to) != 0)
		fail("close");
	return 0;
}
