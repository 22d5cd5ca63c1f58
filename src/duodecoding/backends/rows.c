/* The arguments of a target's pass over a tree of guesses; what they are is said in `torch_inputs.Inputs`, which does the same in
   Python. A GPU has nothing to do meanwhile. */

#include <stdint.h>
#include <string.h>

#define MOST 128       /* rows of a pass */
#define DEEPER 65536   /* a row and its depth in one number: this x depth + row */

/* Few paths from the top down, each with the rows that hang under one of its rows (or under nothing). */
typedef struct {
    int length, hanging;
    int16_t rows[MOST], under[MOST];
} path;

/* `out`: tokens, positions and the table for `size` rows, of which `count` are given; the others are padding. Returns how many lines
   of the table are in use, or -1 where that many rows do not fit. */
int duo_rows(int32_t *out, int size, int count, int first, int members, const int32_t *tokens, const int32_t *parents) {
    if (size > MOST || count > size || count < 1 || members < 1) return -1;
    path paths[MOST];
    int16_t depths[MOST], under[MOST], holder[MOST]; /* of each row: the path it hangs under, and the one it is part of */
    int found = 1;
    paths[0].length = paths[0].hanging = 0;
    for (int row = 0; row < size; row++) {
        const int parent = row < count ? parents[row] : -1;
        int which = 0, depth = 0;
        if (parent >= row) return -1;
        if (parent >= 0) {
            depth = depths[parent] + 1, which = holder[parent];
            if (which < 0) { /* the path that the parent hangs under goes on with it, or forks */
                which = under[parent];
                if (paths[which].length > depth - 1) {
                    memcpy(paths[found].rows, paths[which].rows, (depth - 1) * sizeof(int16_t));
                    paths[found].length = depth - 1, paths[found].hanging = 0;
                    which = found++;
                }
                paths[which].rows[paths[which].length++] = parent;
                holder[parent] = which;
            }
        }
        depths[row] = depth, under[row] = which, holder[row] = -1;
        paths[which].under[paths[which].hanging++] = row;
        out[row] = tokens[row < count ? row : 0];
        out[size + row] = first + depth;
    }
    int32_t *table = out + 2 * size;
    const int width = 3 + members + size;
    int lines = 0;
    for (int k = 0; k < found; k++)
        for (int from = 0; from < paths[k].hanging; from += members) {
            int32_t *line = table + lines++ * width + 3;
            for (int i = 0; i < members; i++) {
                const int row = from + i < paths[k].hanging ? paths[k].under[from + i] : -1;
                line[i] = row < 0 ? -1 : DEEPER * depths[row] + row;
            }
            for (int i = 0; i < paths[k].length; i++) line[members + i] = paths[k].rows[i];
        }
    for (int row = 0; row < size; row++) {
        int32_t *line = table + row * width;
        line[0] = first, line[1] = lines, line[2] = depths[row];
    }
    return lines;
}
