"""The scan plan in plain Python integers: every item, kv head and kv tile written out, no prefix sums, no bisection.

Slow and simple; shares no code with csrc/planner. Key positions are slots 0 .. kv_len - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor


@dataclass(frozen=True)
class Tile:
    """A query tile: folded rows [row, row + rows) of a request and the kv tiles that some of its rows see."""

    request: int
    row: int
    rows: int
    kv_tiles: tuple[int, ...]


@dataclass(frozen=True)
class Costs:
    item: int
    item_row: int
    kv_tile: int
    row: int

    def beside(self, tile: Tile) -> int:
        return self.item + self.item_row * tile.rows

    def unit(self, tile: Tile) -> int:
        return self.kv_tile + self.row * tile.rows

    def whole(self, tile: Tile) -> int:
        return self.beside(tile) + len(tile.kv_tiles) * self.unit(tile)


def visible_kv_tiles(
    qo_len: int, kv_len: int, group: int, rows: range, tile_kv: int, left: int | None, right: int | None
) -> tuple[int, ...]:
    """Indices of the kv tiles that hold a key visible to one of the rows, from the first such tile to the last."""
    first: int | None = None
    last: int | None = None
    for query in sorted({row // group for row in rows}):
        position = kv_len - qo_len + query
        low = 0 if left is None else max(0, position - left)
        high = kv_len - 1 if right is None else min(kv_len - 1, position + right)
        if low <= high:
            first = low if first is None else min(first, low)
            last = high if last is None else max(last, high)
    if first is None or last is None:
        return ()
    return tuple(range(first // tile_kv, last // tile_kv + 1))


def tiles(
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    group: int,
    tile_q_short: int,
    tile_q: int,
    tile_kv: int,
    left: int | None,
    right: int | None,
    stretches: int,
) -> list[Tile]:
    """The line of query tiles.

    Requests with more folded rows than a short tile has come first, where the plan has taller tiles for them. Their
    tiles are dealt like cards, one after the other to each of the stretches in turn; then come the cards of the first
    stretch, those of the second, and so on. All other tiles follow in the order of the requests.
    """
    hands: list[list[Tile]] = [[] for _ in range(stretches)]
    others = []
    dealt = 0
    for request, (qo_len, kv_len) in enumerate(zip(qo_lens, kv_lens, strict=True)):
        folded = qo_len * group
        height = tile_q_short if folded <= tile_q_short else tile_q
        for row in range(0, folded, height):
            rows = min(height, folded - row)
            seen = visible_kv_tiles(qo_len, kv_len, group, range(row, row + rows), tile_kv, left, right)
            tile = Tile(request, row, rows, seen)
            if folded > tile_q_short and tile_q > tile_q_short:
                hands[dealt % stretches].append(tile)
                dealt += 1
            else:
                others.append(tile)
    return [tile for hand in hands for tile in hand] + others


def starts(
    line: Sequence[Tile], heads: int, stretches: int, costs: Costs, chunk: int = 0, room: int = 0
) -> list[tuple[int, int, int]]:
    """Where each stretch begins, and where the last one stops: (tile, head, kv tile counted from the first visible).

    The line of work is every tile, in it every head (a kv head, or a group of them that workers run in lockstep).
    Stretch s begins at the fraction s / stretches of the line's cost. That moves to the nearest border between items,
    if no stretch is then dearer than a fair share by more than two and a half times what an item costs besides its rows
    and kv tiles; else to the nearest border between kv tiles; with chunks, between as many tiles. A half moves to the
    later.

    room: states of chunks that a stretch may leave, 0: any number. A stretch that begins inside an item leaves one for
    each chunk until it stops or the item ends, and one more there. Where that may be more than the room, the stretch
    begins with the item, or so late that the item's rest has room, whichever is nearer.
    """
    items = [(index, head, tile) for index, tile in enumerate(line) for head in range(heads)]
    end = (len(line), 0, 0)
    borders = [0]
    for _, _, tile in items:
        borders.append(borders[-1] + costs.whole(tile))
    targets = [floor(Fraction(borders[-1] * stretch, stretches)) for stretch in range(stretches)]

    def nearest(target: int) -> int:
        return min(range(len(items)), key=lambda i: (borders[i] > target, -i)) if items else 0

    places = [nearest(target) for target in targets]  # of the item inside which a stretch would begin
    if items:
        later = [
            2 * (target - borders[i]) >= borders[i + 1] - borders[i] for target, i in zip(targets, places, strict=True)
        ]
        cuts = [*(i + moved for i, moved in zip(places, later, strict=True)), len(items)]
        dearest = max(borders[after] - borders[before] for before, after in pairwise(cuts))
        if dearest - borders[-1] // stretches <= Fraction(5, 2) * costs.item:
            return [*((*items[cut][:2], 0) if cut < len(items) else end for cut in cuts[:-1]), end]
    result = []
    for target, place in zip(targets, places, strict=True):
        found = end
        if items:
            index, head, tile = items[place]
            step = max(1, chunk)
            into = target - borders[place] - costs.beside(tile)
            border = step * floor(Fraction(into, step * costs.unit(tile)) + Fraction(1, 2))
            border = min(max(0, border), len(tile.kv_tiles))
            if room and 0 < border < len(tile.kv_tiles):
                chunks = ceil(Fraction(len(tile.kv_tiles), step))
                until_stop = (borders[-1] // stretches + 1) // (step * costs.unit(tile)) + 2
                until_end = chunks - border // step
                if min(until_stop, until_end) + 1 > room:
                    late = step * (chunks - (room - 1))
                    border = 0 if border < late - border else late
            if tile.kv_tiles and border == len(tile.kv_tiles):
                found = (*items[place + 1][:2], 0) if place + 1 < len(items) else end
            else:
                found = (index, head, border)
        result.append(found)
    return [*result, end]
