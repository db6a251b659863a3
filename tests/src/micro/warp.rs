//! Exchange between the lanes of a warp: shuffles, votes, elect, ldmatrix, stmatrix.

use fa3_ir::{B32, Builder, Launch, Pred, V};

use super::bench::Bench;
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

fn one_warp(name: &str) -> Bench {
    Bench::new(name, Launch::threads(32))
}

impl Bench {
    /// Writes values of all lanes, one after the other.
    fn record(&mut self, values: &[V<B32>]) {
        let results = self.output(128 * values.len() as u32);
        let mine = self.mine(results, 4);
        for (index, &value) in (0..).zip(values) {
            self.b.store(mine.at(128 * index), value);
        }
    }

    /// A word for each lane.
    fn lanes(&mut self, words_of_lanes: impl IntoIterator<Item = u32>) -> V<B32> {
        let array = self.input(words(words_of_lanes));
        let mine = self.mine(array, 4);
        self.b.load::<B32>(mine)
    }
}

type Shuffle<L> = fn(&mut Builder, V<B32>, L) -> V<B32>;

fn shuffles_constant() -> Micro {
    let mut bench = one_warp("shuffle constant");
    let stream = Stream::new("shuffle");
    let x = bench.lanes((0..32).map(|lane| stream.bits(lane) as u32));
    let shuffles: [Shuffle<u32>; 4] =
        [Builder::shfl_idx, Builder::shfl_bfly, Builder::shfl_up, Builder::shfl_down];
    let mut results = Vec::new();
    for shuffle in shuffles {
        for lane in [0, 1, 2, 3, 5, 16, 31] {
            results.push(shuffle(&mut bench.b, x, lane));
        }
    }
    bench.record(&results);
    bench.finish(Rule::Bits)
}

/// The lane is each lane's own; bits above its fifth are there, too.
fn shuffles_computed() -> Micro {
    let mut bench = one_warp("shuffle computed");
    let (x, within, beyond) = (Stream::new("x"), Stream::new("within"), Stream::new("beyond"));
    let x = bench.lanes((0..32).map(|lane| x.bits(lane) as u32));
    let within = bench.lanes((0..32).map(|lane| within.bits(lane) as u32 % 32));
    let beyond = bench.lanes((0..32).map(|lane| beyond.bits(lane) as u32 % 128));
    let shuffles: [Shuffle<V<B32>>; 4] =
        [Builder::shfl_idx, Builder::shfl_bfly, Builder::shfl_up, Builder::shfl_down];
    let mut results = Vec::new();
    for shuffle in shuffles {
        for lane in [within, beyond] {
            results.push(shuffle(&mut bench.b, x, lane));
        }
    }
    bench.record(&results);
    bench.finish(Rule::Bits)
}

fn votes() -> Micro {
    let mut bench = one_warp("votes");
    let mut results = Vec::new();
    for lanes in [0, u32::MAX, 1, 1 << 31, 0x7FFF_FFFF, 0x1234_5678] {
        let set = bench.lanes((0..32).map(|lane| lanes >> lane & 1));
        let b = &mut bench.b;
        let set = b.ne_b32(set, 0);
        results.push(b.ballot(set));
        for vote in [b.vote_all(set), b.vote_any(set), b.vote_uniform(set)] {
            results.push(b.select(vote, 1, 0));
        }
    }
    bench.record(&results);
    bench.finish(Rule::Bits)
}

/// How many lanes are elected, and whether they are the same again: which one it is nobody may rely on.
fn elect() -> Micro {
    let mut bench = one_warp("elect");
    let b = &mut bench.b;
    let elected: [V<Pred>; 3] = [(); 3].map(|()| b.elect());
    let ballots = elected.map(|elected| b.ballot(elected));
    let results = ballots.map(|ballot| [b.popc_b32(ballot), b.xor(ballot, ballots[0])]);
    bench.record(results.as_flattened());
    bench.finish(Rule::Bits)
}

/// 64 rows of 16 bytes, and one for each lane, no two the same.
const ROWS: u32 = 64;

fn rows_of_lanes(bench: &mut Bench, name: &str, region: fa3_ir::Region) -> V<B32> {
    let rows = Stream::new(name).permutation(ROWS as usize);
    let row = bench.lanes(rows.into_iter().take(32));
    let start = bench.b.address(region);
    bench.b.mad_u32(row, 16, start)
}

fn load<const N: usize>(trans: bool) -> Micro {
    let name = format!("ldmatrix x{N} {}", if trans { "trans" } else { "plain" });
    let mut bench = one_warp(&name);
    let region = bench.b.region("rows", 16 * ROWS, 16);
    let contents = bench.input(Stream::new(&name).bytes(16 * ROWS as usize));
    bench.fill(region, contents, 16 * ROWS);
    bench.b.warp_sync();
    let at = rows_of_lanes(&mut bench, &name, region);
    let registers = bench.b.ldmatrix::<N>(at, trans);
    bench.record(&registers);
    bench.finish(Rule::Bits)
}

fn store<const N: usize>(trans: bool) -> Micro {
    let name = format!("stmatrix x{N} {}", if trans { "trans" } else { "plain" });
    let mut bench = one_warp(&name);
    let region = bench.b.region("rows", 16 * ROWS, 16);
    let contents = bench.input(vec![0xEE; 16 * ROWS as usize]);
    bench.fill(region, contents, 16 * ROWS);
    bench.b.warp_sync();
    let at = rows_of_lanes(&mut bench, &name, region);
    let registers = [(); N].map(|()| ());
    let stream = Stream::new(&name);
    let mut next = 0;
    let registers = registers.map(|()| {
        next += 32;
        bench.lanes((0..32).map(|lane| stream.bits(next + lane) as u32))
    });
    bench.b.stmatrix(at, registers, trans);
    bench.b.warp_sync();
    let results = bench.output(16 * ROWS);
    bench.dump(region, results, 16 * ROWS);
    bench.finish(Rule::Bits)
}
