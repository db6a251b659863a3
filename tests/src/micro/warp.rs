//! Tests of exchanges between the lanes of a warp: shuffles, votes, elect, ldmatrix, stmatrix.

use fa3_ir::lang::{Arg, B32, V};
use fa3_ir::{Launch, Region};

use super::bench::{Bench, micro};
use super::values::{Stream, words};
use super::{Micro, Rule};

pub(super) fn tests() -> Vec<Micro> {
    let mut tests = vec![shuffles_constant(), shuffles_computed(), votes(), elect()];
    for trans in [false, true] {
        tests.extend([load::<1>(trans), load::<2>(trans), load::<4>(trans)]);
        tests.extend([store::<1>(trans), store::<2>(trans), store::<4>(trans)]);
    }
    tests
}

fn one_warp(name: &str, build: impl FnOnce(&mut Bench<'_>)) -> Micro {
    micro(name, Launch::threads(32), Rule::Bits, build)
}

impl<'k> Bench<'k> {
    /// Stores `values` one after the other, each from all lanes.
    fn record(&mut self, values: &[V<'k, B32>]) {
        let results = self.output(128 * values.len() as u32);
        let mine = self.mine(results, 4);
        for (index, &value) in (0..).zip(values) {
            self.b.store(mine.at(128 * index), value);
        }
    }

    /// An input with a word for each lane.
    fn lanes(&mut self, words_of_lanes: impl IntoIterator<Item = u32>) -> V<'k, B32> {
        let array = self.input(words(words_of_lanes));
        self.b.load(self.mine(array, 4))
    }
}

/// All shuffle modes of `x`, each with each of `lanes` as the lane operand.
fn shuffles<'k, L: Arg<Ty = B32>>(x: V<'k, B32>, lanes: &[L]) -> Vec<V<'k, B32>> {
    let shuffles = [V::shfl_idx, V::shfl_bfly, V::shfl_up, V::shfl_down];
    shuffles.iter().flat_map(|shuffle| lanes.iter().map(move |&lane| shuffle(x, lane))).collect()
}

fn shuffles_constant() -> Micro {
    one_warp("shuffle constant", |bench| {
        let stream = Stream::new("shuffle");
        let x = bench.lanes((0..32).map(|lane| stream.bits(lane) as u32));
        bench.record(&shuffles(x, &[0, 1, 2, 3, 5, 16, 31]));
    })
}

/// Shuffles whose lane operand differs between lanes and has bits above its lower five set.
fn shuffles_computed() -> Micro {
    one_warp("shuffle computed", |bench| {
        let (x, within, beyond) = (Stream::new("x"), Stream::new("within"), Stream::new("beyond"));
        let x = bench.lanes((0..32).map(|lane| x.bits(lane) as u32));
        let within = bench.lanes((0..32).map(|lane| within.bits(lane) as u32 % 32));
        let beyond = bench.lanes((0..32).map(|lane| beyond.bits(lane) as u32 % 128));
        bench.record(&shuffles(x, &[within, beyond]));
    })
}

fn votes() -> Micro {
    one_warp("votes", |bench| {
        let mut results = Vec::new();
        for lanes in [0, u32::MAX, 1, 1 << 31, 0x7FFF_FFFF, 0x1234_5678] {
            let set = bench.lanes((0..32).map(|lane| lanes >> lane & 1)).ne(0);
            results.push(set.ballot());
            let votes = [set.vote_all(), set.vote_any(), set.vote_uniform()];
            results.extend(votes.map(|vote| vote.select(1, 0)));
        }
        bench.record(&results);
    })
}

/// Number of elected lanes, and whether a second election elects the same lane. The choice of the lane is unspecified.
fn elect() -> Micro {
    one_warp("elect", |bench| {
        let elected = [(); 3].map(|()| bench.b.elect());
        let ballots = elected.map(V::ballot);
        let results = ballots.map(|ballot| [ballot.popc(), ballot ^ ballots[0]]);
        bench.record(results.as_flattened());
    })
}

/// Number of rows of 16 bytes. Each lane gets its own row.
const ROWS: u32 = 64;

fn rows_of_lanes<'k>(bench: &mut Bench<'k>, name: &str, region: Region) -> V<'k, B32> {
    let rows = Stream::new(name).permutation(ROWS as usize);
    let row = bench.lanes(rows.into_iter().take(32));
    row.mad(16, bench.b.address(region))
}

fn load<const N: usize>(trans: bool) -> Micro {
    let name = format!("ldmatrix x{N} {}", if trans { "trans" } else { "plain" });
    one_warp(&name, |bench| {
        let region = bench.b.region("rows", 16 * ROWS, 16);
        let contents = bench.input(Stream::new(&name).bytes(16 * ROWS as usize));
        bench.fill(region, contents, 16 * ROWS);
        bench.b.warp_sync();
        let at = rows_of_lanes(bench, &name, region);
        let registers = bench.b.ldmatrix::<N>(at, trans);
        bench.record(&registers);
    })
}

fn store<const N: usize>(trans: bool) -> Micro {
    let name = format!("stmatrix x{N} {}", if trans { "trans" } else { "plain" });
    one_warp(&name, |bench| {
        let b = bench.b;
        let region = b.region("rows", 16 * ROWS, 16);
        let contents = bench.input(vec![0xEE; 16 * ROWS as usize]);
        bench.fill(region, contents, 16 * ROWS);
        b.warp_sync();
        let at = rows_of_lanes(bench, &name, region);
        let stream = Stream::new(&name);
        let mut next = 0;
        let registers = [(); N].map(|()| {
            next += 32;
            bench.lanes((0..32).map(|lane| stream.bits(next + lane) as u32))
        });
        b.stmatrix(at, registers, trans);
        b.warp_sync();
        let results = bench.output(16 * ROWS);
        bench.dump(region, results, 16 * ROWS);
    })
}
