/* Calls of fa3's C library, compared with attention in double precision. `calls cpu` computes on the CPU, `calls gpu`
 * on the first GPU by the driver, or prints `skipped` with a reason. `calls gpu refusals` compares no result, so that
 * the driver may be a stand-in. The last line is `ok`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fa3.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTH = 4 };

#define CHECK(what)                                                                     \
    do {                                                                                \
        if (!(what)) {                                                                  \
            fprintf(stderr, "line %d: " #what ": %s\n", __LINE__, fa3_last_error());    \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

/* The device, and the type of Q, K and V: f32 on the CPU, and bf16 on a GPU. */
static int32_t device, dtype;
static int (*cuMemAlloc)(uint64_t *, size_t), (*cuMemcpyHtoD)(uint64_t, const void *, size_t);
static int (*cuMemcpyDtoH)(void *, uint64_t, size_t), (*cuCtxSynchronize)(void);

/* The driver's functions, with the primary context of the first GPU as the current context. */
static const char *open_gpu(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
    if (!library) return "no libcuda";
    int (*init)(unsigned), (*get)(int *, int), (*attribute)(int *, int, int), (*retain)(void **, int), (*set)(void *);
    *(void **)&init = dlsym(library, "cuInit");
    *(void **)&get = dlsym(library, "cuDeviceGet");
    *(void **)&attribute = dlsym(library, "cuDeviceGetAttribute");
    *(void **)&retain = dlsym(library, "cuDevicePrimaryCtxRetain");
    *(void **)&set = dlsym(library, "cuCtxSetCurrent");
    *(void **)&cuMemAlloc = dlsym(library, "cuMemAlloc_v2");
    *(void **)&cuMemcpyHtoD = dlsym(library, "cuMemcpyHtoD_v2");
    *(void **)&cuMemcpyDtoH = dlsym(library, "cuMemcpyDtoH_v2");
    *(void **)&cuCtxSynchronize = dlsym(library, "cuCtxSynchronize");
    int gpu, major = 0, minor = 0;
    if (init(0) || get(&gpu, 0)) return "no GPU";
    attribute(&major, 75, gpu), attribute(&minor, 76, gpu);
    if (major != 9 || minor != 0) return "the first GPU is no Hopper";
    return retain(&context, gpu) || set(context) ? "no context" : NULL;
}

/* A tensor: its numbers as f32 in host memory, and as elements of its type where the device reads them. */
struct array {
    const char *name;
    int32_t dtype, rank;
    int64_t shape[LENGTH];
    size_t count;
    float *numbers;
    void *data;
};

static size_t bytes_of(int32_t type) { return type == FA3_BF16 ? 2 : 4; }

static float as_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits &= 0xffff0000;
    memcpy(&x, &bits, 4);
    return x;
}

static void upload(struct array *x) {
    void *elements = malloc(x->count * 4);
    for (size_t i = 0; i < x->count; i++) {
        int32_t integer = (int32_t)x->numbers[i];
        if (x->dtype == FA3_BF16) memcpy((uint16_t *)elements + i, (char *)&x->numbers[i] + 2, 2);
        else memcpy((float *)elements + i, x->dtype == FA3_I32 ? (void *)&integer : (void *)&x->numbers[i], 4);
    }
    if (device == FA3_CPU) memcpy(x->data, elements, x->count * 4);
    else CHECK(cuMemcpyHtoD((uint64_t)x->data, elements, x->count * bytes_of(x->dtype)) == 0);
    free(elements);
}

static void download(struct array *x) {
    void *elements = calloc(x->count, 4);
    if (device == FA3_CPU) memcpy(elements, x->data, x->count * 4);
    else CHECK(cuMemcpyDtoH(elements, (uint64_t)x->data, x->count * bytes_of(x->dtype)) == 0);
    for (size_t i = 0; i < x->count; i++) {
        uint32_t bits = x->dtype == FA3_BF16 ? (uint32_t)((uint16_t *)elements)[i] << 16 : ((uint32_t *)elements)[i];
        memcpy(&x->numbers[i], &bits, 4);
    }
    free(elements);
}

/* A tensor with random numbers. */
static struct array array(const char *name, int32_t type, int rank, const int64_t *shape) {
    struct array x = {name, type, rank, {0}, 1, NULL, NULL};
    for (int i = 0; i < rank; i++) x.shape[i] = shape[i], x.count *= (size_t)shape[i];
    x.numbers = malloc(x.count * 4);
    for (size_t i = 0; i < x.count; i++) x.numbers[i] = as_bf16((float)rand() / (float)RAND_MAX * 2 - 1);
    uint64_t address = 0;
    if (device != FA3_CPU) CHECK(cuMemAlloc(&address, x.count * 4) == 0);
    x.data = device == FA3_CPU ? malloc(x.count * 4) : (void *)address;
    upload(&x);
    return x;
}

/* A list of integers. */
static struct array list(const char *name, int rank, const int64_t *shape, const int *numbers) {
    struct array x = array(name, FA3_I32, rank, shape);
    for (size_t i = 0; i < x.count; i++) x.numbers[i] = (float)numbers[i];
    upload(&x);
    return x;
}

static int plan_of(const char *operation, struct array *const *arrays, size_t count, const fa3_option *options,
                   size_t option_count, fa3_plan **plan) {
    fa3_tensor tensors[16];
    for (size_t i = 0; i < count; i++) {
        const struct array *x = arrays[i];
        tensors[i] = (fa3_tensor){x->name, x->dtype, x->rank, x->shape, NULL};
    }
    return fa3_plan_new(operation, device, tensors, count, options, option_count, plan);
}

/* A workspace, which begins as zeros. */
static struct array zeros(size_t bytes) {
    struct array x = array("workspace", FA3_F32, 1, (int64_t[]){(int64_t)(bytes + 3) / 4});
    memset(x.numbers, 0, x.count * 4);
    upload(&x);
    return x;
}

/* Plans, launches, waits and frees. */
static void run(const char *operation, struct array *const *arrays, size_t count, const fa3_option *options,
                size_t option_count) {
    fa3_plan *plan = NULL;
    void *data[16];
    for (size_t i = 0; i < count; i++) data[i] = arrays[i]->data;
    CHECK(plan_of(operation, arrays, count, options, option_count, &plan) == FA3_OK);
    size_t bytes = fa3_workspace_bytes(plan);
    CHECK(fa3_launch(plan, NULL, data, bytes > 0 ? zeros(bytes).data : NULL) == FA3_OK);
    if (device != FA3_CPU) CHECK(cuCtxSynchronize() == 0);
    for (size_t i = 0; i < count; i++) {
        if (arrays[i]->dtype != FA3_I32) download(arrays[i]);
    }
    fa3_free(plan);
}

static float *row(const struct array *x, int64_t row, int64_t head) {
    int64_t heads = x->shape[x->rank - 2], columns = x->shape[x->rank - 1];
    return x->numbers + (row * heads + head) * columns;
}

static int is_near(double x, double expected) {
    double tolerance = device == FA3_CPU ? 1e-5 : 2e-2;
    return fabs(x - expected) <= tolerance * (1 + fabs(expected));
}

/* Compares a query's row of O and its LSE with attention over `count` keys, whose rows are `keys`. */
static void check_row(struct array *const *arrays, int64_t query, int head, const int64_t *keys, int count, float lse) {
    const struct array *q = arrays[0], *k = arrays[1], *v = arrays[2], *o = arrays[3];
    int64_t columns = q->shape[q->rank - 1], group = q->shape[q->rank - 2] / k->shape[k->rank - 2];
    double sum = 0, scores[64], expected;
    for (int j = 0; j < count; j++) {
        double score = 0;
        for (int64_t c = 0; c < columns; c++) score += row(q, query, head)[c] * row(k, keys[j], head / group)[c];
        sum += scores[j] = exp(score / sqrt((double)columns));
    }
    for (int64_t c = 0; c < columns; c++) {
        expected = 0;
        for (int j = 0; j < count; j++) expected += scores[j] / sum * row(v, keys[j], head / group)[c];
        CHECK(is_near(row(o, query, head)[c], expected));
    }
    CHECK(is_near(lse, log(sum)));
}

/* A dense batch with a causal mask, and its gradients. */
static void dense(void) {
    const int64_t of_q[] = {2, 20, 4, 64}, of_k[] = {2, 20, 2, 64}, of_lse[] = {2, 4, 20};
    struct array q = array("q", dtype, 4, of_q), k = array("k", dtype, 4, of_k), v = array("v", dtype, 4, of_k);
    struct array o = array("o", dtype, 4, of_q), lse = array("lse", FA3_F32, 3, of_lse);
    struct array *arrays[] = {&q, &k, &v, &o, &lse};
    const fa3_option options[] = {{"window", {-1, 0, 0}}, {"deterministic", {1}}};
    run("forward", arrays, 5, options, 1);
    for (int i = 0; i < 2 * 20 * 4; i++) {
        int batch = i / 80, query = i / 4 % 20, head = i % 4;
        int64_t keys[20];
        for (int j = 0; j <= query; j++) keys[j] = batch * 20 + j;
        check_row(arrays, batch * 20 + query, head, keys, query + 1, lse.numbers[(batch * 4 + head) * 20 + query]);
    }
    struct array dout = array("dout", dtype, 4, of_q), dq = array("dq", dtype, 4, of_q);
    struct array dk = array("dk", dtype, 4, of_k), dv = array("dv", dtype, 4, of_k);
    struct array *of_gradients[] = {&q, &k, &v, &o, &lse, &dout, &dq, &dk, &dv};
    run("backward", of_gradients, 9, options, 2);
    /* The last key is seen by the last query alone: dV is the sum of P dO over the heads of its group. */
    for (int c = 0; c < 64; c++) {
        double expected = 0;
        for (int head = 0; head < 2; head++) {
            double score = 0;
            for (int i = 0; i < 64; i++) score += row(&q, 19, head)[i] * row(&k, 19, 0)[i];
            expected += exp(score / 8 - lse.numbers[head * 20 + 19]) * row(&dout, 19, head)[c];
        }
        CHECK(is_near(row(&dv, 19, 0)[c], expected));
    }
    /* A softmax does not change if the same number is added to all scores, so that the first query has no gradient. */
    for (int c = 0; c < 64; c++) CHECK(is_near(row(&dq, 0, 3)[c], 0) && isfinite(row(&dk, 7, 1)[c]));
}

/* Packed sequences of 5, 0 and 11 tokens, without a mask. */
static void packed(void) {
    const int64_t of_q[] = {16, 4, 64}, of_lse[] = {4, 16}, four[] = {4};
    const int ends[] = {0, 5, 5, 16};
    struct array q = array("q", dtype, 3, of_q), k = array("k", dtype, 3, of_q), v = array("v", dtype, 3, of_q);
    struct array o = array("o", dtype, 3, of_q), lse = array("lse", FA3_F32, 2, of_lse);
    struct array ends_q = list("cu_seqlens_q", 1, four, ends), ends_k = list("cu_seqlens_k", 1, four, ends);
    struct array *arrays[] = {&q, &k, &v, &o, &lse, &ends_q, &ends_k};
    run("forward", arrays, 7, NULL, 0);
    for (int i = 0; i < 16 * 4; i++) {
        int query = i / 4, first = query < 5 ? 0 : 5, count = query < 5 ? 5 : 11;
        int64_t keys[16];
        for (int j = 0; j < count; j++) keys[j] = first + j;
        check_row(arrays, query, i % 4, keys, count, lse.numbers[i % 4 * 16 + query]);
    }
}

/* Decoding: one query for each of two sequences of 7 and 3 keys, in pages of 4 rows, whose keys CTAs share. */
static void paged(void) {
    const int64_t of_q[] = {2, 1, 4, 64}, of_k[] = {6, 4, 1, 64}, of_lse[] = {2, 4, 1}, two[] = {2}, pages[] = {2, 2};
    struct array q = array("q", dtype, 4, of_q), k = array("k", dtype, 4, of_k), v = array("v", dtype, 4, of_k);
    struct array o = array("o", dtype, 4, of_q), lse = array("lse", FA3_F32, 3, of_lse);
    struct array table = list("page_table", 2, pages, (int[]){5, 2, 0, 0}), used = list("seqused_k", 1, two, (int[]){7, 3});
    struct array *arrays[] = {&q, &k, &v, &o, &lse, &table, &used};
    const fa3_option options[] = {{"split_keys", {-1}}};
    run("forward", arrays, 7, options, 1);
    const int64_t keys[2][7] = {{20, 21, 22, 23, 8, 9, 10}, {0, 1, 2}};
    for (int i = 0; i < 8; i++) check_row(arrays, i / 4, i % 4, keys[i / 4], i < 4 ? 7 : 3, lse.numbers[i]);
}

/* Asserts that a call is refused with this code and a message with these words. */
static void refused(int code, int expected, const char *words) {
    if (code != expected || !strstr(fa3_last_error(), words)) {
        fprintf(stderr, "code %d, expected %d, \"%s\", expected \"%s\"\n", code, expected, fa3_last_error(), words);
        exit(1);
    }
}

static void *has_no_error(void *unused) {
    CHECK(fa3_last_error()[0] == 0);
    return unused;
}

static void refusals(void) {
    const int64_t shape[] = {1, 8, 2, 64}, too_small[] = {1, 2, 7};
    struct array q = array("q", dtype, 4, shape), k = array("k", dtype, 4, shape), v = array("v", dtype, 4, shape);
    struct array o = array("o", dtype, 4, shape), lse = array("lse", FA3_F32, 3, too_small);
    struct array *arrays[] = {&q, &k, &v, &o, &lse, &v}, wrong = v;
    struct array workspace = zeros(1 << 16);
    fa3_option option;
    fa3_plan *plan = NULL;
    refused(plan_of("attention", arrays, 4, NULL, 0, &plan), FA3_INVALID, "there is no operation attention");
    refused(plan_of("forward", arrays, 2, NULL, 0, &plan), FA3_INVALID, "there is no v");
    refused(plan_of("forward", arrays, 6, NULL, 0, &plan), FA3_INVALID, "there are two tensors v");
    refused(fa3_plan_new("forward", device, NULL, 1, NULL, 0, &plan), FA3_INVALID, "NULL");
    refused(fa3_plan_new(NULL, device, NULL, 0, NULL, 0, &plan), FA3_INVALID, "NULL");
    refused(fa3_plan_new("\xff", device, NULL, 0, NULL, 0, &plan), FA3_INVALID, "not UTF-8");
    refused(fa3_launch(NULL, NULL, NULL, NULL), FA3_INVALID, "plan or data is NULL");
    refused(fa3_plan_new("forward", 1000000, NULL, 0, NULL, 0, &plan), FA3_INVALID, "there is no q");

    option = (fa3_option){"windows", {1}};
    refused(plan_of("forward", arrays, 4, &option, 1, &plan), FA3_INVALID, "has no option windows");
    option = (fa3_option){"sm_margin", {0.5}};
    refused(plan_of("forward", arrays, 4, &option, 1, &plan), FA3_INVALID, "sm_margin is 0.5, expected an integer");
    option = (fa3_option){"softcap", {1, 2}};
    refused(plan_of("forward", arrays, 4, &option, 1, &plan), FA3_INVALID, "softcap has three values, expected one");
    option = (fa3_option){"v_transposed", {2}};
    refused(plan_of("forward", arrays, 4, &option, 1, &plan), FA3_INVALID, "v_transposed is 2, expected 0 or 1");

    arrays[2] = &wrong;
    wrong.rank = 6;
    refused(plan_of("forward", arrays, 4, NULL, 0, &plan), FA3_INVALID, "v has rank 6");
    wrong.rank = 3;
    refused(plan_of("forward", arrays, 4, NULL, 0, &plan), FA3_INVALID, "");
    wrong = v, wrong.shape[1] = -8;
    refused(plan_of("forward", arrays, 4, NULL, 0, &plan), FA3_INVALID, "v has extent -8");
    wrong = v, wrong.dtype = 9;
    refused(plan_of("forward", arrays, 4, NULL, 0, &plan), FA3_INVALID, "v has dtype 9");
    wrong = v, wrong.name = "w";
    arrays[5] = &wrong, arrays[2] = &v;
    refused(plan_of("forward", arrays, 6, NULL, 0, &plan), FA3_INVALID, "has no tensor w");

    /* Lists and LSE have no gaps. */
    int64_t strides[] = {1, 1, 2};
    fa3_tensor gaps[] = {{"q", dtype, 4, shape, NULL}, {"k", dtype, 4, shape, NULL}, {"v", dtype, 4, shape, NULL},
                         {"o", dtype, 4, shape, NULL}, {"lse", FA3_F32, 3, too_small, strides}};
    refused(fa3_plan_new("forward", device, gaps, 5, NULL, 0, &plan), FA3_INVALID, "lse is f32 (1, 2, 7), expected no");
    gaps[4].dtype = dtype == FA3_F32 ? FA3_F16 : dtype, gaps[4].strides = NULL;
    refused(fa3_plan_new("forward", device, gaps, 5, NULL, 0, &plan), FA3_INVALID, "expected f32");
    CHECK(plan == NULL);

    /* LSE of 8 rows does not fit into 7 numbers. A plan on a GPU knows it, and a launch on the CPU. */
    void *data[] = {q.data, k.data, v.data, o.data, lse.data};
    int code = plan_of("forward", arrays, 5, NULL, 0, &plan);
    if (code == FA3_OK) code = fa3_launch(plan, NULL, data, workspace.data);
    refused(code, FA3_INVALID, "lse takes 64 bytes, its memory has 56");
    fa3_free(plan);
    CHECK(plan_of("forward", arrays, 4, NULL, 0, &plan) == FA3_OK);
    CHECK(fa3_workspace_bytes(plan) <= workspace.count * 4);
    data[1] = NULL;
    refused(fa3_launch(plan, NULL, data, workspace.data), FA3_INVALID, "k has a null address");
    data[1] = data[3];
    refused(fa3_launch(plan, NULL, data, workspace.data), FA3_INVALID, "overlaps");
    data[1] = k.data;
    CHECK(fa3_launch(plan, NULL, data, workspace.data) == FA3_OK);
    fa3_free(plan);
    fa3_free(NULL);

    /* Splits need a workspace. */
    option = (fa3_option){"split_keys", {-1}};
    if (device != FA3_CPU) {
        const int64_t one[] = {1, 1, 2, 64}, many[] = {1, 4096, 2, 64};
        q = array("q", dtype, 4, one), o = array("o", dtype, 4, one), k = v = array("k", dtype, 4, many), v.name = "v";
        CHECK(plan_of("forward", arrays, 4, &option, 1, &plan) == FA3_OK && fa3_workspace_bytes(plan) > 0);
        void *const of_splits[] = {q.data, k.data, v.data, o.data};
        refused(fa3_launch(plan, NULL, of_splits, NULL), FA3_INVALID, "the workspace has 0 bytes");
        refused(fa3_launch(plan, NULL, of_splits, (char *)workspace.data + 16), FA3_INVALID, "the workspace lies at");
        fa3_free(plan);
    }
    CHECK(fa3_last_error()[0] != 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, has_no_error, NULL) == 0 && pthread_join(thread, NULL) == 0);
}

int main(int count, char **words) {
    int on_gpu = count > 1 && strcmp(words[1], "gpu") == 0;
    const char *why = on_gpu ? open_gpu() : NULL;
    if (why) {
        printf("skipped: %s\n", why);
        return 0;
    }
    device = on_gpu ? 0 : FA3_CPU, dtype = on_gpu ? FA3_BF16 : FA3_F32;
    if (count < 3) dense(), packed(), paged();
    refusals();
    printf("ok\n");
    return 0;
}
