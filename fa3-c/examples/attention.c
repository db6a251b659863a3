/* Causal attention of two sequences of 64 tokens, 8 query heads and 2 key/value heads of 128 columns, on the CPU. */
#include <fa3.h>
#include <stdio.h>
#include <stdlib.h>

/* O = softmax(mask(Q Kᵀ / √head_dim)) V. The tensors lie in the memory of the device. On a GPU, dtype is FA3_BF16 or
 * FA3_F16, and the workspace has at least fa3_workspace_bytes(plan), which were zeros before its first use. */
static int attend(int32_t device, void *stream, void *workspace, int32_t dtype, void *q, void *k, void *v, void *o,
                  float *lse) {
    const int64_t of_q[] = {2, 64, 8, 128}, of_k[] = {2, 64, 2, 128}, of_lse[] = {2, 8, 64};
    const fa3_tensor tensors[] = {
        {"q", dtype, 4, of_q, NULL}, {"k", dtype, 4, of_k, NULL},         {"v", dtype, 4, of_k, NULL},
        {"o", dtype, 4, of_q, NULL}, {"lse", FA3_F32, 3, of_lse, NULL},
    };
    const fa3_option options[] = {{"window", {-1, 0, 0}}};
    fa3_plan *plan = NULL;
    int code = fa3_plan_new("forward", device, tensors, 5, options, 1, &plan);
    if (code == FA3_OK) {
        void *const data[] = {q, k, v, o, lse};
        code = fa3_launch(plan, stream, data, workspace);
    }
    if (code != FA3_OK) fprintf(stderr, "fa3 %s: %s\n", fa3_version(), fa3_last_error());
    /* On a GPU, the plan must live until the stream has done its work. */
    fa3_free(plan);
    return code;
}

int main(void) {
    const size_t rows_q = 2 * 64 * 8, rows_k = 2 * 64 * 2;
    float *q = malloc(rows_q * 128 * sizeof *q), *k = malloc(rows_k * 128 * sizeof *k);
    float *o = malloc(rows_q * 128 * sizeof *o), *lse = malloc(rows_q * sizeof *lse);
    for (size_t i = 0; i < rows_q * 128; i++) q[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    for (size_t i = 0; i < rows_k * 128; i++) k[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    int code = attend(FA3_CPU, NULL, NULL, FA3_F32, q, k, k, o, lse);
    /* The first query sees one key, so that O is V's row, and LSE is the score. */
    if (code == FA3_OK) printf("o = %f, v = %f, lse = %f\n", o[0], k[0], lse[0]);
    free(q), free(k), free(o), free(lse);
    return code;
}
