//! Observations: the contents of registers, and whether the kernel's claims hold.

use fa3_ir::ObserveInst;

use crate::machine::{At, Machine};
use crate::probe::Probe;
use crate::rule::Rule;
use crate::simulation::Mode;
use crate::warp::each;

impl Machine<'_> {
    pub(super) fn observe(&mut self, at: At, inst: &ObserveInst, active: u32) {
        // Registers hold no numbers in this mode.
        if self.mode == Mode::Skeleton {
            return;
        }
        match inst {
            ObserveInst::Probe { name, registers, ty, is_fragment } => {
                let event = self.event(at);
                let Some(site) = self.site(event, None) else { return };
                let warp = &self.clusters[at.cluster].ctas[at.cta].warps[at.warp];
                let code = &self.program.codes[warp.code];
                let registers = registers.iter().map(|&register| warp.operand(code, register)).collect();
                let (name, ty, is_fragment) = (name.clone(), *ty, *is_fragment);
                self.probes.push(Probe { name, site, lanes: active, ty, registers, is_fragment });
            }
            ObserveInst::Assert { condition, claim } => {
                let warp = &self.clusters[at.cluster].ctas[at.cta].warps[at.warp];
                let holds = warp.value(&self.program.codes[warp.code], condition.pred);
                let broken: Vec<String> = each(active)
                    .filter(|&lane| (holds[lane] != 0) == condition.negate)
                    .map(|lane| lane.to_string())
                    .collect();
                if !broken.is_empty() {
                    let what = format!("\"{claim}\" does not hold in lanes {}", broken.join(", "));
                    self.find(Rule::Assert, at, what);
                }
            }
        }
    }
}
