//! Guards: instructions that only some lanes execute.

use std::collections::HashSet;

use crate::inst::Access;
use crate::lang::{Builder, Pred, Var};
use crate::{Block, Condition, Inst, Node, Stmt, Value};

impl Builder {
    /// Predicates the instructions that `body` builds: only the lanes where `condition` holds execute them, and
    /// what they define is undefined in the others. A body with control flow becomes [`Builder::if_lanes`].
    #[track_caller]
    pub fn guarded(&self, condition: impl Into<Condition>, body: impl FnOnce()) {
        self.predicated(condition.into(), |_, _| true, body);
    }

    /// Like [`Builder::guarded`], but all lanes execute instructions without side effects, such as address
    /// computations, unless [`Builder::guard_all`] was called. If these instructions were predicated, an assembler
    /// would keep the other lanes' old register contents from one round of a loop to the next.
    #[track_caller]
    pub(crate) fn guarded_effects(&self, condition: impl Into<Condition>, body: impl FnOnce()) {
        let all = self.state().guards_all;
        self.predicated(condition.into(), |inst, undefined| all || !inst.is_harmless(undefined), body);
    }

    /// Has all instructions of [`Builder::once_per_warp`] predicated from here on, address computations included.
    pub fn guard_all(&self) {
        self.state().guards_all = true;
    }

    /// Predicates the instructions that `is_guarded` accepts, given the values that earlier instructions leave
    /// undefined.
    #[track_caller]
    fn predicated(
        &self,
        condition: Condition,
        is_guarded: impl Fn(&Inst, &HashSet<Value>) -> bool,
        body: impl FnOnce(),
    ) {
        let condition = self.kept(condition);
        let mut body = self.block(body);
        let predicable = |stmt: &Stmt| matches!(stmt.node, Node::Inst { guard: None, .. });
        if !body.iter().all(predicable) {
            self.append(Node::If { condition, uniform: false, then: body, otherwise: Block::new() });
            return;
        }
        let mut undefined = HashSet::new();
        for stmt in &mut body {
            if let Node::Inst { guard, inst } = &mut stmt.node
                && is_guarded(inst, &undefined)
            {
                *guard = Some(condition);
                inst.visit(&mut |access| {
                    if let Access::Write(value, _) = access {
                        undefined.insert(value);
                    }
                });
            }
        }
        self.state().block.append(&mut body);
    }

    /// The condition's present value: a copy if the condition is a variable, which the body may assign.
    #[track_caller]
    fn kept(&self, condition: Condition) -> Condition {
        let index = condition.pred.0 as usize;
        let mutable = self.state().kernel.values.get(index).is_some_and(|info| info.mutable);
        if !mutable {
            return condition;
        }
        Condition { pred: self.copied(Var::<Pred>::new(self, condition.pred)), ..condition }
    }
}
