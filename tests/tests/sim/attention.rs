//! A warp-specialised attention kernel: a producer warp, two consumer warpgroups, rings of two stages. It is what the
//! simulator is for, and it must be silent about it under every schedule.

use std::time::Instant;

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::{Buffer, Memory, Mode, Outcome, Policy, Simulation};
use half::bf16;

use crate::samples::{assert_clean, floats, policies};

const D: u32 = 128;
const BLOCK: u32 = 128;
/// Bytes of a tile: 128 rows of 2 x 64 columns.
const TILE: u32 = BLOCK * D * 2;
const HALF: u32 = TILE / 2;

/// The shared memory of the kernel.
struct Memories {
    q: Region,
    k: Region,
    v: Region,
    q_full: Region,
    k_full: Region,
    k_empty: Region,
    v_full: Region,
    v_empty: Region,
}

/// O = softmax(Q Kᵀ scale) V for one head: 128 rows of Q a CTA, `blocks` blocks of 128 keys. O is binary32.
pub(crate) fn attention() -> Kernel {
    Kernel::build("attention", Launch::threads(384), |b| {
        let shape = BoxShape::new(Elem::Bf16, &[64, 128], Swizzle::B128);
        let [q_map, k_map, v_map] = ["q", "k", "v"].map(|name| b.param_tensor_map(name, shape));
        let o = b.param_pointer("o", Elem::F32);
        let (scale, blocks) = (b.param_f32("scale_log2"), b.param_u32("blocks"));
        let m = Memories {
            q: b.region("q_tile", TILE, 1024),
            k: b.region("k_tiles", 2 * TILE, 1024),
            v: b.region("v_tiles", 2 * TILE, 1024),
            q_full: b.mbarriers("q_full", 1, 1),
            k_full: b.mbarriers("k_full", 2, 1),
            k_empty: b.mbarriers("k_empty", 2, 8),
            v_full: b.mbarriers("v_full", 2, 1),
            v_empty: b.mbarriers("v_empty", 2, 8),
        };
        let (tid, cta) = (b.tid(), b.cta_x());
        b.if_lanes(tid.eq(0), || {
            b.mbarrier_init(m.q_full, 1);
            for stage in [0, 8] {
                b.mbarrier_init(m.k_full.at(stage), 1);
                b.mbarrier_init(m.v_full.at(stage), 1);
                b.mbarrier_init(m.k_empty.at(stage), 8);
                b.mbarrier_init(m.v_empty.at(stage), 8);
            }
            b.fence(FenceInst::MbarrierInit);
        });
        b.sync_cta();

        b.role(Role::new("producer", 0..4).registers(24), || {
            b.if_uniform((tid >> 5).eq(0), || {
                b.if_lanes(b.elect(), || {
                    b.mbarrier_arrive_expect(m.q_full, TILE);
                    let row = cta * BLOCK;
                    for half in 0..2 {
                        let to = m.q.at((half * HALF) as i32);
                        b.tma_load(to, q_map, (64 * half, row), m.q_full, LoadOptions::default());
                    }
                    b.for_each((0, blocks), 1, |j| {
                        for (map, tiles, full, empty) in
                            [(k_map, m.k, m.k_full, m.k_empty), (v_map, m.v, m.v_full, m.v_empty)]
                        {
                            let (stage, phase) = stage_and_phase(j);
                            let [full, empty] = [full, empty].map(|ring| of_stage(b, ring, stage, 8));
                            b.mbarrier_wait(empty, phase ^ 1);
                            b.mbarrier_arrive_expect(full, TILE);
                            let (tile, row) = (of_stage(b, tiles, stage, TILE), j * BLOCK);
                            for half in 0..2 {
                                let to = tile.at((half * HALF) as i32);
                                b.tma_load(to, map, (64 * half, row), full, LoadOptions::default());
                            }
                        }
                    });
                });
            });
        });
        b.role(Role::new("consumer", 4..12).registers(240), || {
            consumer(b, &m, tid, cta, o, scale, blocks);
        });
    })
}

fn stage_and_phase<'k>(j: V<'k, B32>) -> (V<'k, B32>, V<'k, B32>) {
    (j & 1, (j >> 1) & 1)
}

fn of_stage<'k>(b: &'k Builder, region: Region, stage: V<'k, B32>, bytes: u32) -> V<'k, B32> {
    stage.mad(bytes, b.address(region))
}

fn descriptor<'k>(address: V<'k, B32>, layout: Layout) -> V<'k, B64> {
    address.bfe(4, 14).to_u64() | layout.descriptor()
}

fn consumer<'k>(
    b: &'k Builder,
    m: &Memories,
    tid: V<'k, B32>,
    cta: V<'k, B32>,
    o: V<'k, B64>,
    scale: V<'k, F32>,
    blocks: V<'k, B32>,
) {
    let k_major = Layout::k_major(Swizzle::B128);
    let mn_major = Layout::mn_major(Swizzle::B128, BLOCK);
    let thread = tid - 128;
    let group = thread >> 7;
    let elected = b.elect();
    let q = descriptor(group.mad(64 * 128, b.address(m.q)), k_major);
    let (s, acc) = (b.accumulator("s", BLOCK / 2), b.accumulator("o_acc", D / 2));
    acc.iter().for_each(|&x| x.set(0.0));
    let max = [(); 2].map(|()| b.var("max", f32::NEG_INFINITY));
    let sum = [(); 2].map(|()| b.var("sum", 0.0));
    b.mbarrier_wait(m.q_full, 0);
    b.for_each((0, blocks), 1, |j| {
        let (stage, phase) = stage_and_phase(j);
        // S = Q Kᵀ
        let (full, empty) = (of_stage(b, m.k_full, stage, 8), of_stage(b, m.k_empty, stage, 8));
        b.mbarrier_wait(full, phase);
        let k = descriptor(of_stage(b, m.k, stage, TILE), k_major);
        b.wgmma_fence();
        for step in 0..8u32 {
            let advance = descriptor_address(step / 4 * HALF + step % 4 * 32);
            let mma = Mma::new(WgmmaType::Bf16, &s, q + advance, k + advance);
            b.wgmma(if step == 0 { mma } else { mma.accumulate() });
        }
        b.wgmma_commit();
        b.wgmma_wait(0);
        b.guarded(elected, || b.mbarrier_arrive(empty));
        // P = exp2(scale S - scale max)
        let mut p = s.clone();
        for half in 0..2 {
            let rows: Vec<usize> = (0..s.len()).filter(|v| v / 2 % 2 == half).collect();
            let mut block_max = max[half].get();
            for &v in &rows {
                block_max = block_max.max(s[v]);
            }
            for mask in [1, 2] {
                block_max = block_max.max(block_max.shfl_bfly(mask));
            }
            let shrink = ((max[half] - block_max) * scale).ex2();
            max[half].set(block_max);
            let shift = -(block_max * scale);
            let mut block_sum = sum[half] * shrink;
            for &v in &rows {
                let e = s[v].now().fma(scale, shift).ex2();
                block_sum = block_sum + e;
                p[v] = b.var("p", e);
                acc[v].set(acc[v] * shrink);
            }
            sum[half].set(block_sum);
        }
        // O += P V
        let (full, empty) = (of_stage(b, m.v_full, stage, 8), of_stage(b, m.v_empty, stage, 8));
        b.mbarrier_wait(full, phase);
        let v = descriptor(of_stage(b, m.v, stage, TILE), mn_major);
        let factors: Vec<V<B32>> =
            p.chunks_exact(2).map(|pair| pair[1].now().bf16x2_above(pair[0])).collect();
        b.wgmma_fence();
        for step in 0..8usize {
            let v = v + step as u64 * mn_major.k_step(Major::Mn);
            let a = [0, 1, 2, 3].map(|i| factors[4 * step + i]);
            b.wgmma(Mma::with_registers(WgmmaType::Bf16, &acc, a, v).b_mn_major().accumulate());
        }
        b.wgmma_commit();
        b.wgmma_wait(0);
        b.guarded(elected, || b.mbarrier_arrive(empty));
    });
    // O / sum
    let lane = tid & 31;
    let (warp_row, lane_row) = (thread >> 5, lane >> 2);
    let at = cta.mad(BLOCK, warp_row.mad(16, lane_row)).mad(D, (lane & 3) << 1).mad_wide(4, o);
    for (half, sum) in sum.into_iter().enumerate() {
        let mut total = sum.get();
        for mask in [1, 2] {
            total = total + total.shfl_bfly(mask);
        }
        let inverse = total.rcp();
        for v in (0..acc.len()).filter(|v| v / 2 % 2 == half).step_by(2) {
            let pair = [acc[v] * inverse, acc[v + 1] * inverse];
            let offset = 4 * (8 * half * D as usize + 8 * (v / 4));
            b.store_vector(at.at(offset as i32), pair);
        }
    }
}

/// A launch over one head, and the head itself.
pub(crate) struct Head {
    pub(crate) memory: Memory,
    pub(crate) args: Vec<ArgValue>,
    pub(crate) o: Buffer,
    rows: usize,
    qkv: [Vec<f32>; 3],
}

impl Head {
    pub(crate) fn new(rows: usize) -> Head {
        let mut memory = Memory::new();
        let d = D as usize;
        let value = |seed: usize, i: usize| {
            let x = (i.wrapping_mul(2654435761).wrapping_add(seed * 97) >> 7) % 1000;
            bf16::from_f32(x as f32 / 250.0 - 2.0).to_f32()
        };
        let qkv = [1, 2, 3].map(|seed| (0..rows * d).map(|i| value(seed, i)).collect::<Vec<f32>>());
        let views = [0, 1, 2].map(|i| {
            let bytes: Vec<u8> = qkv[i].iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
            let buffer = memory.alloc_from(["q", "k", "v"][i], &bytes);
            ArgValue::Tensor(TensorView::contiguous(buffer.address(), &[d as u64, rows as u64], Elem::Bf16))
        });
        let o = memory.alloc("o", rows * d * 4);
        memory.expect_written_once(o);
        let scale = std::f32::consts::LOG2_E / (d as f32).sqrt();
        let rest = [ArgValue::Pointer(o.address()), ArgValue::F32(scale), ArgValue::U32(rows as u32 / BLOCK)];
        Head { memory, args: views.into_iter().chain(rest).collect(), o, rows, qkv }
    }

    pub(crate) fn run(&mut self, kernel: &Kernel, policy: Policy, mode: Mode) -> Outcome {
        let simulation =
            Simulation::new(kernel).grid([self.rows as u32 / BLOCK, 1, 1]).args(self.args.clone());
        simulation.policy(policy).mode(mode).run(&mut self.memory).unwrap()
    }

    /// The largest difference of O from its definition.
    fn error(&self) -> f64 {
        let d = D as usize;
        let [q, k, v] = &self.qkv;
        let o = floats(&self.memory, self.o);
        let mut worst: f64 = 0.0;
        for row in 0..self.rows {
            let scores: Vec<f64> = (0..self.rows)
                .map(|key| {
                    let dot: f64 =
                        (0..d).map(|i| f64::from(q[row * d + i]) * f64::from(k[key * d + i])).sum();
                    dot / (d as f64).sqrt()
                })
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            for column in 0..d {
                let sum: f64 = scores
                    .iter()
                    .enumerate()
                    .map(|(key, s)| (s - max).exp() * f64::from(v[key * d + column]))
                    .sum();
                worst = worst.max((f64::from(o[row * d + column]) - sum / total).abs());
            }
        }
        worst
    }
}

#[test]
fn attention_is_right_and_the_same_under_every_schedule() {
    let kernel = attention();
    let mut bits = None;
    for policy in policies() {
        let mut head = Head::new(384);
        let outcome = head.run(&kernel, policy, Mode::Exact);
        assert_clean(&outcome);
        let now = head.memory.read(head.o);
        if bits.is_none() {
            let error = head.error();
            assert!(error < 0.02, "{error}");
        }
        assert_eq!(*bits.get_or_insert(now.clone()), now, "{policy:?}");
    }
}

#[test]
fn a_head_of_512_keys_takes_less_than_a_second() {
    let kernel = attention();
    for mode in [Mode::Exact, Mode::Fast, Mode::Skeleton] {
        let mut head = Head::new(512);
        let start = Instant::now();
        let outcome = head.run(&kernel, Policy::Eager, mode);
        let seconds = start.elapsed().as_secs_f64();
        assert_clean(&outcome);
        println!("{mode:?}: {seconds:.3} s");
        // 1 s on an idle core; others may be at work.
        assert!(seconds < 3.0, "{seconds} s");
    }
}
