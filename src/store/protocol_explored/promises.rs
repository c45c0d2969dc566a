//! What must be true of every world.

use super::*;

impl<R: Rules> Walk<R> {
    /// What must be true of every world.
    pub(super) fn holds(&self, world: &World) -> Checked {
        if let Some((answer, left)) = world.done {
            let kept = world.record.is_some_and(|record| {
                record.state == State::Completed
                    && record.answer == answer
                    && record.expires == left
            });
            promise(kept, "a completion was lost or changed before it expired")?;
        }
        let mut live = 0;
        let mut effects = [0; 16];
        for (at, run) in world.runs.iter().enumerate() {
            effects[usize::from(run.ran_in)] += 1;
            if matches!(run.phase, Phase::Holding | Phase::Ran) {
                live += usize::from(self.accepted(world, run, token(at.try_into().unwrap())));
                let begins = run.phase == Phase::Holding && run.life == world.lives;
                let replaced = world
                    .record
                    .is_some_and(|record| usize::from(record.token) != at);
                let late = begins && world.done.is_some() && !replaced;
                promise(!late, "a run may begin after its own completion")?;
            }
        }
        promise(live <= 1, "two owners live at once")?;
        self.fences(world)?;
        let once = self.setting.takeover || effects[1..].iter().all(|effects| *effects <= 1);
        promise(once, "two effects in one life of the record")
    }

    /// Whatever a token that is not the record's sends, at any time, changes nothing. Since this is
    /// tried in every world, the messages of the past need not wait in the network for it.
    pub(super) fn fences(&self, world: &World) -> Checked {
        for at in 0..self.setting.owners * CLAIMS_EACH {
            let this = u8::try_from(at).unwrap();
            let its_own = world.record.is_some_and(|record| record.token == this);
            if its_own || world.runs[at].phase == Phase::Unused {
                continue;
            }
            let stale = token(this);
            let done = Completion::tombstone(http::StatusCode::OK);
            for (slot, settled) in [
                R::complete(self.slot(world), stale, done),
                R::release(self.slot(world), stale, 1, self.setting.checkpoints),
                R::abandon(self.slot(world), stale, 1),
            ] {
                let same = slot.as_ref().map(Kept::of) == world.record;
                promise(
                    same && settled == Settled::Lost,
                    "a stale token changed the record",
                )?;
            }
        }
        Ok(())
    }

    /// Whether the store would still take this owner's outcome, and believes it alive.
    pub(super) fn accepted(&self, world: &World, run: &Run, token: Token) -> bool {
        let Some(record) = world.record else {
            return false;
        };
        if record.run_left == 0 || world.leases[usize::from(run.instance)] == 0 {
            return false;
        }
        let done = Completion::tombstone(http::StatusCode::OK);
        let open = record.state != State::Completed;
        open && R::complete(self.slot(world), token, done).1 == Settled::Done
    }
}
