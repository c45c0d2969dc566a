//! What happens when a message arrives, and whether it was right.

use super::*;

fn leases(world: &World) -> Leases {
    let leases = world.leases.iter().enumerate();
    let live = leases.filter(|(_, left)| **left > 0);
    let live =
        live.map(|(instance, left)| (owner(instance.try_into().unwrap()), NOW.after(ticks(*left))));
    Leases(live.collect())
}

impl<R: Rules> Walk<R> {
    pub(super) fn claim(&mut self, mut world: World, at: usize) -> Checked {
        let run = world.runs[at];
        let this = u8::try_from(at).unwrap();
        let mut request = self.requests[at].clone();
        request.replaces = (run.replaces != NONE).then(|| token(run.replaces));
        let leases = leases(&world);
        let slot = self.slot(&world);
        let (slot, reply) = R::claim(slot, &request, owner(run.instance), &leases);

        let before = world.record.filter(|record| !record.expired());
        let after = slot.as_ref().map(Kept::of);
        world.record = after;
        if let Some((done, _)) = world.done {
            let told =
                matches!(&reply, Claim::Completed(record) if Kept::of(record).answer == done);
            promise(told, "a claim after a completion was not answered by it")?;
        }
        match &reply {
            Claim::Won(ticket) => {
                let after = after.ok_or("a claim was won and no record kept")?;
                let ours = after.token == this && ticket.token == token(this);
                promise(ours, "a claim was won under another token")?;
                promise(
                    after.state == State::Running,
                    "a claim was won and does not run",
                )?;
                self.won(&mut world, at, before, after)?;
            }
            _ => {
                promise(
                    after == before,
                    "a claim that was not won changed the record",
                )?;
                let before = before.ok_or("a claim without a record was not won")?;
                let resent = before.token == this && before.state == State::Running;
                promise(!resent, "a claim sent again was taken for a rival's")?;
                let alive = before.state == State::Running && !world.gone(&before);
                let as_it_is = match &reply {
                    Claim::InFlight(_) => alive,
                    Claim::Abandoned(_) => !alive && before.state != State::Completed,
                    _ => before.state == State::Completed,
                };
                promise(as_it_is, "a claim was told something untrue")?;
            }
        }

        let asking = run.phase == Phase::Asking;
        if !asking {
            self.arrived(world, at, CLAIM);
            return Ok(());
        }
        // The reply is lost, arrives at once, or, where it matters, arrives later.
        self.arrived(world, at, CLAIM);
        let mut heard = world;
        match reply {
            Claim::Won(_) => {
                let mut later = world;
                later.runs[at].network |= WON;
                self.arrived(later, at, CLAIM);
                heard.heard_won(at);
            }
            Claim::Abandoned(held) => {
                let process = at / CLAIMS_EACH;
                heard.over(process, at);
                heard.processes[process].seen = held.token.as_bytes()[0];
                heard.processes[process].seen_released = held.released;
            }
            _ => heard.over(at / CLAIMS_EACH, at),
        }
        self.arrived(heard, at, CLAIM);
        Ok(())
    }

    /// A claim was won: by right?
    pub(super) fn won(
        &self,
        world: &mut World,
        at: usize,
        before: Option<Kept>,
        after: Kept,
    ) -> Checked {
        let run = world.runs[at];
        match before {
            None => {
                promise(after.attempt == 1, "a first claim was not attempt 1")?;
                world.lives += 1;
            }
            Some(before) if before.token == after.token => {
                promise(after == before, "a claim sent again changed the record")?;
            }
            Some(before) => {
                let released = before.state == State::Released;
                let gone = released || before.state == State::Abandoned || world.gone(&before);
                promise(gone, "a claim took over from the living")?;
                let named = run.replaces == before.token;
                promise(named, "a claim took over without naming the token")?;
                let allowed = self.setting.takeover || released;
                promise(allowed, "a claim took over though nobody may")?;
                let counted = after.attempt == before.attempt + 1;
                promise(counted, "a takeover did not count as one more attempt")?;
            }
        }
        world.runs[at].life = world.lives;
        let lease = &mut world.leases[usize::from(run.instance)];
        *lease = (*lease).max(LEASE);
        Ok(())
    }

    pub(super) fn take_over(&mut self, mut world: World, at: usize) -> Checked {
        let run = world.runs[at];
        let taking = TakingOver {
            abandoned: token(run.replaces),
            token: token(at.try_into().unwrap()),
            hold: ticks(HOLD),
            owner: owner(run.instance),
        };
        let (slot, taken) = R::take_over(self.slot(&world), &taking, &leases(&world));
        let before = world.record;
        world.record = slot.as_ref().map(Kept::of);
        match &taken {
            Some(ticket) => self.taken(&mut world, at, before, ticket)?,
            None => {
                let same = world.record == before;
                promise(same, "a takeover that failed changed the record")?;
                let may = before.is_some_and(|before| {
                    let named = before.token == run.replaces;
                    let gone = before.state == State::Abandoned || world.gone(&before);
                    !before.expired() && named && gone
                });
                promise(!may, "an abandoned record was not taken over by its token")?;
            }
        }
        self.arrived(world, at, TAKE_OVER);
        if run.phase != Phase::Asking {
            return Ok(());
        }
        let mut heard = world;
        match taken {
            Some(_) => {
                let mut later = world;
                later.runs[at].network |= WON;
                self.arrived(later, at, TAKE_OVER);
                heard.heard_won(at);
            }
            None => heard.over(at / CLAIMS_EACH, at),
        }
        self.arrived(heard, at, TAKE_OVER);
        Ok(())
    }

    /// A record was taken over: by right, and is it what it was?
    fn taken(
        &self,
        world: &mut World,
        at: usize,
        before: Option<Kept>,
        ticket: &Ticket,
    ) -> Checked {
        let run = world.runs[at];
        let this = u8::try_from(at).unwrap();
        promise(world.done.is_none(), "a completed record was taken over")?;
        let before = before.filter(|before| !before.expired());
        let before = before.ok_or("a record was taken over that is not there")?;
        let attempt = u32::from(before.attempt);
        let ours = ticket.token == token(this) && ticket.attempt == attempt;
        promise(ours, "a takeover was told another ticket")?;
        if before.token == this {
            let same = world.record == Some(before);
            promise(same, "a takeover sent again changed the record")?;
        } else {
            let named = run.replaces == before.token;
            promise(named, "a record was taken over without naming the token")?;
            let gone = before.state == State::Abandoned || world.gone(&before);
            promise(gone, "a record was taken over from the living")?;
            let expected = Kept {
                state: State::Running,
                token: this,
                instance: run.instance,
                run_left: HOLD,
                ..before
            };
            let kept = world.record == Some(expected);
            promise(kept, "a takeover changed more than who holds the record")?;
        }
        world.runs[at].life = world.lives;
        let lease = &mut world.leases[usize::from(run.instance)];
        *lease = (*lease).max(HOLD);
        Ok(())
    }

    pub(super) fn settle(&mut self, mut world: World, at: usize, message: u8) -> Checked {
        let this = u8::try_from(at).unwrap();
        let before = world.record;
        let slot = self.slot(&world);
        let (slot, settled) = match message {
            COMPLETE => {
                let done = Completion::retained(http::StatusCode::OK, answer(this));
                R::complete(slot, token(this), done)
            }
            RELEASE => {
                let saved = self.setting.checkpoints;
                R::release(slot, token(this), given_back(at).into(), saved)
            }
            _ => R::abandon(slot, token(this), given_back(at).into()),
        };
        let after = slot.as_ref().map(Kept::of);
        world.record = after;
        if before.is_none_or(|before| before.token != this) {
            promise(settled == Settled::Lost, "a stale token was acknowledged")?;
        }
        if settled == Settled::Lost {
            promise(
                after == before,
                "an operation that was lost changed the record",
            )?;
        } else if message == COMPLETE {
            let after = after.ok_or("a completion was acknowledged and no record kept")?;
            promise(
                after.state == State::Completed,
                "a completion was acknowledged and not kept",
            )?;
            promise(
                after.answer == this,
                "a completion was acknowledged with another answer",
            )?;
            if before.is_some_and(|before| before.state != State::Completed) {
                world.done = Some((this, TTL));
            }
        } else if let (Some(before), Some(after)) = (before, after) {
            let attempt = match given_back(at) {
                0 => before.attempt,
                given => before.attempt.min(given),
            };
            promise(
                after.attempt == attempt,
                "a claim was given back with another attempt",
            )?;
        }
        self.arrived(world, at, message);
        if world.runs[at].phase == Phase::Settling {
            let mut heard = world;
            heard.over(at / CLAIMS_EACH, at);
            self.arrived(heard, at, message);
        }
        Ok(())
    }
}
