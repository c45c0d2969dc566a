//! Every interleaving of a few processes on one key.
//!
//! Three processes claim, run and settle through a network that delays, duplicates and loses
//! messages and replies; they fall silent, come back, crash and start again; time passes and purges
//! happen. Breadth first, so that all states within the depth reached are seen. In each of them the
//! promises are checked against a book of our own, which knows nothing of the functions under test.
//!
//! A test that cannot fail proves nothing: `tests` below runs the same walk over broken functions.

use std::{
    collections::HashSet,
    hash::{BuildHasherDefault, Hasher},
};

use super::super::*;
use super::{NOW, owner, request, token};

const OWNERS: usize = 3;
/// How many claims a process may make at most, over a crash too.
const CLAIMS_EACH: usize = 2;
const TOKENS: usize = OWNERS * CLAIMS_EACH;
/// A process and its restart are two store instances.
const INSTANCES: usize = OWNERS * 2;
const NONE: u8 = u8::MAX;

// In ticks of one microsecond. All differ, so that each is the first to end somewhere.
const LEASE: u8 = 2;
const MAX_RUN: u8 = 3;
const TTL: u8 = 2;
const ABANDONED_TTL: u8 = 1;

/// The answer of each token's run, by its first byte.
static ANSWERS: [u8; TOKENS] = [0, 1, 2, 3, 4, 5];

// Messages under way, a set of bits per token.
const CLAIM: u8 = 1;
const COMPLETE: u8 = 2;
const RELEASE: u8 = 4;
const ABANDON: u8 = 8;
/// The reply to a claim.
const WON: u8 = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    Unused,
    Asking,
    Holding,
    Ran,
    Settling,
    Over,
}

/// What belongs to one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Run {
    phase: Phase,
    network: u8,
    /// What it settles by, to be sent again when the reply was lost.
    settles: u8,
    replaces: u8,
    instance: u8,
    /// The record's life it was granted in, and the one it had its effect in.
    life: u8,
    ran_in: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Process {
    restarted: bool,
    claims: u8,
    current: u8,
    /// The token it was told is abandoned, and whether it was released.
    seen: u8,
    seen_released: bool,
}

/// The record, its times as ticks left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Kept {
    state: State,
    token: u8,
    instance: u8,
    attempt: u8,
    run_left: u8,
    expires: u8,
    answer: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct World {
    record: Option<Kept>,
    leases: [u8; INSTANCES],
    processes: [Process; OWNERS],
    runs: [Run; TOKENS],
    duplicates: u8,
    // Our own book: how many lives the record had, and the completion that must not be lost.
    lives: u8,
    done: Option<(u8, u8)>,
}

/// What is allowed in a walk.
#[derive(Debug, Clone, Copy)]
struct Setting {
    owners: usize,
    /// How many claims each process may make.
    claims: u8,
    takeover: bool,
    checkpoints: bool,
    abandoned_ttl: bool,
    duplicates: u8,
    states: usize,
}

/// The functions under test, to be replaced one by one by broken ones.
trait Rules {
    fn claim(
        slot: Option<Record>,
        request: &ClaimRequest,
        owner: Owner,
        leases: &Leases,
    ) -> (Option<Record>, Claim) {
        claim(slot, request, owner, leases, NOW)
    }

    fn complete(slot: Option<Record>, token: Token, done: Completion) -> (Option<Record>, Settled) {
        let lifetimes = Lifetimes::new(ticks(TTL));
        complete(slot, token, done, lifetimes, NOW)
    }

    fn release(slot: Option<Record>, token: Token, saved: bool) -> (Option<Record>, Settled) {
        release(slot, token, saved, ticks(TTL), NOW)
    }

    fn abandon(slot: Option<Record>, token: Token) -> (Option<Record>, Settled) {
        abandon(slot, token)
    }

    fn purge(slot: Option<Record>) -> (Option<Record>, bool) {
        purge(slot, NOW)
    }
}

struct Real;

impl Rules for Real {}

fn ticks(ticks: u8) -> Duration {
    Duration::from_micros(ticks.into())
}

fn left(until: Timestamp) -> u8 {
    let micros = until.as_micros() - NOW.as_micros();
    u8::try_from(micros.max(0)).unwrap_or(NONE)
}

impl Kept {
    fn of(record: &Record) -> Self {
        Self {
            state: record.state,
            token: record.token.as_bytes()[0],
            instance: record.owner.as_bytes()[0],
            attempt: record.attempt.try_into().unwrap(),
            run_left: left(record.run_until),
            expires: record.expires.map_or(NONE, left),
            answer: record.response.as_ref().map_or(NONE, |answer| answer[0]),
        }
    }

    fn record(&self, template: &Record) -> Record {
        let answered = self.answer != NONE;
        Record {
            state: self.state,
            token: token(self.token),
            owner: owner(self.instance),
            attempt: self.attempt.into(),
            run_until: NOW.after(ticks(self.run_left)),
            expires: (self.expires != NONE).then(|| NOW.after(ticks(self.expires))),
            response: answered.then(|| answer(self.answer)),
            ..template.clone()
        }
    }

    fn expired(&self) -> bool {
        self.expires == 0
    }
}

fn answer(token: u8) -> bytes::Bytes {
    let at = usize::from(token);
    bytes::Bytes::from_static(&ANSWERS[at..=at])
}

type Checked = Result<(), String>;

fn promise(holds: bool, broken: &str) -> Checked {
    if holds { Ok(()) } else { Err(broken.into()) }
}

struct Walk<R> {
    setting: Setting,
    requests: [ClaimRequest; TOKENS],
    template: Record,
    rules: std::marker::PhantomData<R>,
    next: Vec<World>,
}

impl<R: Rules> Walk<R> {
    fn new(setting: Setting) -> Self {
        let requests = std::array::from_fn(|at| {
            let mut request = request(at.try_into().unwrap());
            request.request_id = None;
            request.lease = ticks(LEASE);
            request.max_run = ticks(MAX_RUN);
            request.abandoned_ttl = setting.abandoned_ttl.then(|| ticks(ABANDONED_TTL));
            request
        });
        Self {
            setting,
            template: Record::claimed(&requests[0], owner(0), NOW),
            requests,
            rules: std::marker::PhantomData,
            next: Vec::new(),
        }
    }

    fn slot(&self, world: &World) -> Option<Record> {
        world.record.map(|kept| kept.record(&self.template))
    }

    /// All worlds one step away, or the promise that a step broke.
    fn step(&mut self, world: &World) -> Checked {
        self.next.clear();
        for process in 0..self.setting.owners {
            self.act(world, process);
        }
        for at in 0..self.setting.owners * CLAIMS_EACH {
            self.deliver(world, at)?;
        }
        self.tick(world);
        self.purge(world)?;
        for world in &mut self.next {
            world.forget_the_past();
            *world = world.sorted(self.setting.owners);
        }
        Ok(())
    }

    /// What a process does by itself.
    fn act(&mut self, world: &World, process: usize) {
        let this = world.processes[process];
        let instance = process * 2 + usize::from(this.restarted);
        if this.current == NONE {
            if this.claims < self.setting.claims {
                self.ask(world, process, instance);
            }
        } else {
            self.go_on(world, process, usize::from(this.current));
            if world.leases[instance] < LEASE {
                let mut renewed = *world;
                renewed.leases[instance] = LEASE;
                self.next.push(renewed);
            }
        }
        if !this.restarted && this.claims > 0 {
            let mut crashed = *world;
            crashed.processes[process] = Process {
                restarted: true,
                current: NONE,
                seen: NONE,
                seen_released: false,
                ..this
            };
            if this.current != NONE {
                crashed.runs[usize::from(this.current)].phase = Phase::Over;
            }
            self.next.push(crashed);
        }
    }

    fn ask(&mut self, world: &World, process: usize, instance: usize) {
        let this = world.processes[process];
        let at = process * CLAIMS_EACH + usize::from(this.claims);
        // It names what it was told, or what an operator's list just showed it, however wrong.
        let told = (this.seen, this.seen_released);
        let shown = world.record.map_or((NONE, false), |record| {
            (record.token, record.state == State::Released)
        });
        for (named, (replaces, released)) in [(NONE, true), told, shown].into_iter().enumerate() {
            let twice = named == 2 && shown.0 == told.0;
            if twice || (named > 0 && replaces == NONE) || !(self.setting.takeover || released) {
                continue;
            }
            let mut asked = *world;
            asked.runs[at].phase = Phase::Asking;
            asked.runs[at].network = CLAIM;
            asked.runs[at].replaces = replaces;
            asked.runs[at].instance = instance.try_into().unwrap();
            asked.processes[process] = Process {
                claims: this.claims + 1,
                current: at.try_into().unwrap(),
                seen: NONE,
                seen_released: false,
                ..this
            };
            self.next.push(asked);
        }
    }

    fn go_on(&mut self, world: &World, process: usize, at: usize) {
        let run = world.runs[at];
        let mut push = |change: &dyn Fn(&mut World)| {
            let mut next = *world;
            change(&mut next);
            self.next.push(next);
        };
        let settle = |by: u8| {
            move |next: &mut World| {
                next.runs[at].phase = Phase::Settling;
                next.runs[at].settles = by;
                next.runs[at].network |= by;
            }
        };
        match run.phase {
            Phase::Asking => {
                if run.network & CLAIM == 0 {
                    push(&|next| next.runs[at].network |= CLAIM);
                }
                // Whoever asked has gone, so that what may be won is given back.
                push(&|next| {
                    next.runs[at].network |= RELEASE;
                    next.over(process, at);
                });
            }
            Phase::Holding => {
                push(&|next| {
                    next.runs[at].phase = Phase::Ran;
                    next.runs[at].ran_in = run.life;
                });
                push(&settle(RELEASE));
                push(&settle(ABANDON));
            }
            Phase::Ran => {
                push(&settle(COMPLETE));
                push(&settle(ABANDON));
            }
            Phase::Settling => {
                if run.network & run.settles == 0 {
                    push(&|next| next.runs[at].network |= run.settles);
                }
                if run.settles == COMPLETE {
                    // It could not record its outcome in time and gives up, while the completion
                    // may still arrive.
                    push(&settle(ABANDON));
                }
                push(&|next| next.over(process, at));
            }
            Phase::Unused | Phase::Over => {}
        }
    }

    /// What the network does with the messages of one token.
    fn deliver(&mut self, world: &World, at: usize) -> Checked {
        for message in [CLAIM, COMPLETE, RELEASE, ABANDON, WON] {
            if world.runs[at].network & message == 0 {
                continue;
            }
            let mut arrived = *world;
            arrived.runs[at].network &= !message;
            match message {
                WON => {
                    arrived.heard_won(at);
                    self.next.push(arrived);
                    continue;
                }
                CLAIM => self.claim(arrived, at)?,
                _ => self.settle(arrived, at, message)?,
            }
        }
        Ok(())
    }

    /// Keeps an arrival, and the same with the message still under way.
    fn arrived(&mut self, world: World, at: usize, message: u8) {
        self.next.push(world);
        if world.duplicates > 0 {
            let mut again = world;
            again.duplicates -= 1;
            again.runs[at].network |= message;
            self.next.push(again);
        }
    }

    fn claim(&mut self, mut world: World, at: usize) -> Checked {
        let run = world.runs[at];
        let this = u8::try_from(at).unwrap();
        let mut request = self.requests[at].clone();
        request.replaces = (run.replaces != NONE).then(|| token(run.replaces));
        let leases = world
            .leases
            .iter()
            .enumerate()
            .filter(|(_, left)| **left > 0);
        let leases = leases
            .map(|(instance, left)| (owner(instance.try_into().unwrap()), NOW.after(ticks(*left))));
        let leases = Leases(leases.collect());
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
    fn won(&self, world: &mut World, at: usize, before: Option<Kept>, after: Kept) -> Checked {
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

    fn settle(&mut self, mut world: World, at: usize, message: u8) -> Checked {
        let this = u8::try_from(at).unwrap();
        let before = world.record;
        let slot = self.slot(&world);
        let (slot, settled) = match message {
            COMPLETE => {
                let done = Completion::retained(http::StatusCode::OK, answer(this));
                R::complete(slot, token(this), done)
            }
            RELEASE => R::release(slot, token(this), self.setting.checkpoints),
            _ => R::abandon(slot, token(this)),
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
        }
        self.arrived(world, at, message);
        if world.runs[at].phase == Phase::Settling {
            let mut heard = world;
            heard.over(at / CLAIMS_EACH, at);
            self.arrived(heard, at, message);
        }
        Ok(())
    }

    fn tick(&mut self, world: &World) {
        let mut later = *world;
        for left in &mut later.leases {
            *left = left.saturating_sub(1);
        }
        if let Some(record) = &mut later.record {
            record.run_left = record.run_left.saturating_sub(1);
            if record.expires != NONE {
                record.expires = record.expires.saturating_sub(1);
            }
        }
        later.done = later.done.map(|(answer, left)| (answer, left - 1));
        later.done = later.done.filter(|(_, left)| *left > 0);
        if later != *world {
            self.next.push(later);
        }
    }

    fn purge(&mut self, world: &World) -> Checked {
        let Some(before) = world.record else {
            return Ok(());
        };
        let mut purged = *world;
        purged.record = R::purge(self.slot(world)).0.as_ref().map(Kept::of);
        if before.expired() {
            promise(purged.record.is_none(), "a purge left an expired record")?;
        } else {
            promise(
                purged.record == world.record,
                "a purge changed what is not over",
            )?;
        }
        self.next.push(purged);
        Ok(())
    }

    /// What must be true of every world.
    fn holds(&self, world: &World) -> Checked {
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
    fn fences(&self, world: &World) -> Checked {
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
                R::release(self.slot(world), stale, self.setting.checkpoints),
                R::abandon(self.slot(world), stale),
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
    fn accepted(&self, world: &World, run: &Run, token: Token) -> bool {
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

impl World {
    fn new(setting: Setting) -> Self {
        let process = Process {
            restarted: false,
            claims: 0,
            current: NONE,
            seen: NONE,
            seen_released: false,
        };
        let run = Run {
            phase: Phase::Unused,
            network: 0,
            settles: 0,
            replaces: NONE,
            instance: NONE,
            life: 0,
            ran_in: 0,
        };
        Self {
            record: None,
            leases: [0; INSTANCES],
            processes: [process; OWNERS],
            runs: [run; TOKENS],
            duplicates: setting.duplicates,
            lives: 0,
            done: None,
        }
    }

    fn heard_won(&mut self, at: usize) {
        if self.runs[at].phase == Phase::Asking {
            self.runs[at].phase = Phase::Holding;
        }
    }

    fn over(&mut self, process: usize, at: usize) {
        self.runs[at].phase = Phase::Over;
        self.processes[process].current = NONE;
    }

    /// A running record whose owner is silent or whose time is over.
    fn gone(&self, record: &Kept) -> bool {
        let silent = self.leases[usize::from(record.instance)] == 0;
        record.state == State::Running && (silent || record.run_left == 0)
    }

    /// Drops what can make no difference any more, so that equal futures are one world.
    fn forget_the_past(&mut self) {
        let current = self.record.map_or(NONE, |record| record.token);
        let going = |run: &Run| !matches!(run.phase, Phase::Unused | Phase::Over);
        let open = self.runs;
        let mut instances = [false; INSTANCES];
        for (at, run) in self.runs.iter_mut().enumerate() {
            let waited_for = |life: u8| open.iter().any(|run| going(run) && run.life == life);
            if run.ran_in != self.lives && !waited_for(run.ran_in) {
                run.ran_in = 0;
            }
            if !going(run) {
                run.life = 0;
                run.settles = 0;
                if run.network & CLAIM == 0 {
                    run.replaces = NONE;
                }
                // What a lost caller is told is read by nobody, and what a token that is not the
                // record's asks for was tried already (`fences`).
                run.network &= !WON;
                if run.network & CLAIM == 0 && usize::from(current) != at {
                    run.network = 0;
                }
                if run.network & CLAIM == 0 && usize::from(current) != at {
                    run.instance = NONE;
                    continue;
                }
            }
            instances[usize::from(run.instance)] = true;
        }
        if let Some(record) = &self.record {
            instances[usize::from(record.instance)] = true;
        }
        for (process, left) in self.leases.iter_mut().enumerate() {
            let this = self.processes[process / 2];
            let runs = usize::from(this.restarted) == process % 2;
            if !instances[process] && !runs {
                *left = 0;
            }
        }
        self.renumber_lives();
    }

    /// Lives are told apart and nothing more, so their numbers may be small.
    fn renumber_lives(&mut self) {
        let mut used = [false; 16];
        used[usize::from(self.lives)] = true;
        for run in &self.runs {
            used[usize::from(run.life)] = true;
            used[usize::from(run.ran_in)] = true;
        }
        let mut names = [0; 16];
        let mut name = 0;
        for life in 1..16 {
            name += u8::from(used[life]);
            names[life] = name;
        }
        self.lives = names[usize::from(self.lives)];
        for run in &mut self.runs {
            run.life = names[usize::from(run.life)];
            run.ran_in = names[usize::from(run.ran_in)];
        }
    }

    /// The processes are alike, so worlds that differ in who is who are one. Any order will do to
    /// be right; the more often equal worlds get the same one, the fewer there are.
    fn sorted(&self, owners: usize) -> Self {
        let rank = |process: usize| {
            let this = self.processes[process];
            let mut rank = (u64::from(this.claims) << 1) | u64::from(this.restarted);
            for at in process * CLAIMS_EACH..(process + 1) * CLAIMS_EACH {
                let run = self.runs[at];
                let ours = self
                    .record
                    .is_some_and(|record| usize::from(record.token) == at);
                rank = (rank << 3) | run.phase as u64;
                rank = (rank << 5) | u64::from(run.network);
                rank = (rank << 1) | u64::from(ours);
            }
            let leases = (self.leases[process * 2] << 2) | self.leases[process * 2 + 1];
            (rank << 4) | u64::from(leases)
        };
        let ranks: [u64; OWNERS] = std::array::from_fn(rank);
        let mut order: [usize; OWNERS] = std::array::from_fn(|process| process);
        order[..owners].sort_by_key(|process| ranks[*process]);
        if order.is_sorted() {
            return *self;
        }
        let mut new = [0; OWNERS];
        for (at, process) in order.into_iter().enumerate() {
            new[process] = at;
        }
        let renamed = |name: u8, each: usize| {
            if name == NONE {
                return NONE;
            }
            let (process, rest) = (usize::from(name) / each, usize::from(name) % each);
            u8::try_from(new[process] * each + rest).unwrap()
        };
        let token = |name: u8| renamed(name, CLAIMS_EACH);
        let mut sorted = *self;
        for (at, process) in order.into_iter().enumerate() {
            sorted.processes[at] = self.processes[process];
            sorted.processes[at].current = token(self.processes[process].current);
            sorted.processes[at].seen = token(self.processes[process].seen);
            for claim in 0..CLAIMS_EACH {
                let mut run = self.runs[process * CLAIMS_EACH + claim];
                run.replaces = token(run.replaces);
                run.instance = renamed(run.instance, 2);
                sorted.runs[at * CLAIMS_EACH + claim] = run;
            }
            for instance in 0..2 {
                sorted.leases[at * 2 + instance] = self.leases[process * 2 + instance];
            }
        }
        if let Some(record) = &mut sorted.record {
            record.token = token(record.token);
            record.instance = renamed(record.instance, 2);
            record.answer = token(record.answer);
        }
        sorted.done = self.done.map(|(answer, left)| (token(answer), left));
        sorted
    }
}

/// A few multiplications: the default hasher takes most of the time of a walk.
#[derive(Default)]
struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 29)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u8(*byte);
        }
    }

    fn write_u8(&mut self, byte: u8) {
        self.0 = (self.0.rotate_left(5) ^ u64::from(byte)).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_isize(&mut self, discriminant: isize) {
        self.write_u8(discriminant as u8);
    }

    fn write_usize(&mut self, len: usize) {
        self.write_u8(len as u8);
    }
}

#[derive(Debug)]
struct Seen {
    states: usize,
    steps: usize,
    depth: usize,
    /// No state was left out.
    whole: bool,
}

/// Walks until every state was seen, or as many as the setting allows. A broken promise comes back
/// with the depth and the world it was broken in.
fn walk<R: Rules>(setting: Setting) -> Result<Seen, String> {
    let mut walk = Walk::<R>::new(setting);
    let first = World::new(setting);
    let mut visited = HashSet::<World, BuildHasherDefault<Mixer>>::default();
    visited.insert(first);
    let (mut level, mut depth, mut steps) = (vec![first], 0, 0);
    while !level.is_empty() {
        let mut next = Vec::new();
        for world in &level {
            let within = |broken| format!("{broken}, {depth} steps deep, around {world:?}");
            walk.holds(world).map_err(within)?;
            walk.step(world).map_err(within)?;
            steps += walk.next.len();
            let new = walk.next.iter().copied();
            next.extend(new.filter(|world| visited.insert(*world)));
            if visited.len() >= setting.states {
                return Ok(Seen {
                    states: visited.len(),
                    steps,
                    depth,
                    whole: false,
                });
            }
        }
        level = next;
        depth += 1;
    }
    Ok(Seen {
        states: visited.len(),
        steps,
        depth,
        whole: true,
    })
}

/// Three processes, two claims each, everything allowed.
const ALL: Setting = Setting {
    owners: 3,
    claims: 2,
    takeover: true,
    checkpoints: true,
    abandoned_ttl: true,
    duplicates: 1,
    states: 200_000,
};

/// The same where an unknown outcome is never run again.
const REFUSING: Setting = Setting {
    takeover: false,
    checkpoints: false,
    abandoned_ttl: false,
    ..ALL
};

fn explore(setting: Setting) -> Seen {
    let begun = std::time::Instant::now();
    let seen = walk::<Real>(setting).unwrap_or_else(|broken| panic!("{broken}"));
    println!("{setting:?}: {seen:?} in {:?}", begun.elapsed());
    let far = seen.whole || seen.states >= setting.states;
    assert!(
        far && seen.steps > seen.states && seen.depth >= 8,
        "{seen:?}"
    );
    seen
}

#[test]
fn two_processes_with_one_claim_each_break_no_promise_in_any_world_there_is() {
    let seen = explore(Setting {
        owners: 2,
        claims: 1,
        states: 1_000_000,
        duplicates: 0,
        ..REFUSING
    });
    assert!(seen.whole, "{seen:?}");
}

#[test]
fn three_processes_with_one_claim_each_break_no_promise_where_takeover_is_refused() {
    explore(Setting {
        claims: 1,
        ..REFUSING
    });
}

#[test]
fn three_processes_with_one_claim_each_break_no_promise_where_takeover_is_allowed() {
    explore(Setting {
        claims: 1,
        takeover: true,
        ..REFUSING
    });
}

#[test]
fn two_processes_with_two_claims_each_break_no_promise() {
    explore(Setting {
        owners: 2,
        takeover: true,
        ..REFUSING
    });
}

#[test]
fn three_processes_with_two_claims_each_checkpoints_and_expiry_break_no_promise() {
    explore(ALL);
}

/// Walks over broken functions, and wants the promise to be seen broken.
fn caught<R: Rules>(setting: Setting, promise: &str) {
    match walk::<R>(setting) {
        Ok(seen) => panic!("nothing noticed that {promise}: {seen:?}"),
        Err(broken) => assert!(broken.starts_with(promise), "{broken}"),
    }
}

macro_rules! broken {
    ($($test:ident: $setting:expr, $promise:literal { $($function:item)+ })*) => {
        $(
            #[test]
            fn $test() {
                struct Broken;

                impl Rules for Broken {
                    $($function)+
                }

                caught::<Broken>($setting, $promise);
            }
        )*
    };
}

broken! {
    a_takeover_that_names_no_token_is_caught: ALL, "a claim took over without naming the token" {
        fn claim(
            slot: Option<Record>,
            request: &ClaimRequest,
            owner: Owner,
            leases: &Leases,
        ) -> (Option<Record>, Claim) {
            let token = slot.as_ref().map(|record| record.token);
            let replaces = token.filter(|token| *token != request.token);
            let request = ClaimRequest { replaces, ..request.clone() };
            claim(slot, &request, owner, leases, NOW)
        }
    }
    a_takeover_from_the_living_is_caught: ALL, "a claim took over from the living" {
        fn claim(
            slot: Option<Record>,
            request: &ClaimRequest,
            owner: Owner,
            leases: &Leases,
        ) -> (Option<Record>, Claim) {
            let none = Leases::default();
            let named = request.replaces.is_some();
            claim(slot, request, owner, if named { &none } else { leases }, NOW)
        }
    }
    a_resent_claim_taken_for_a_rival_is_caught:
        REFUSING, "a claim sent again was taken for a rival's"
    {
        fn claim(
            slot: Option<Record>,
            request: &ClaimRequest,
            owner: Owner,
            leases: &Leases,
        ) -> (Option<Record>, Claim) {
            match slot {
                Some(record) if record.token == request.token => {
                    let held = Held::of(&record);
                    (Some(record), Claim::InFlight(held))
                }
                slot => claim(slot, request, owner, leases, NOW),
            }
        }
    }
    a_claim_that_runs_again_after_a_completion_is_caught:
        REFUSING, "a claim after a completion was not answered by it"
    {
        fn claim(
            slot: Option<Record>,
            request: &ClaimRequest,
            owner: Owner,
            leases: &Leases,
        ) -> (Option<Record>, Claim) {
            let slot = slot.filter(|record| record.state != State::Completed);
            claim(slot, request, owner, leases, NOW)
        }
    }
    a_completion_that_ignores_the_token_is_caught: REFUSING, "a stale token" {
        fn complete(slot: Option<Record>, given: Token, done: Completion) -> (Option<Record>, Settled) {
            let token = slot.as_ref().map_or(given, |record| record.token);
            Real::complete(slot, token, done)
        }
    }
    a_second_completion_that_overwrites_is_caught:
        REFUSING, "a completion was lost or changed before it expired"
    {
        fn complete(mut slot: Option<Record>, token: Token, done: Completion) -> (Option<Record>, Settled) {
            if let Some(record) = &mut slot
                && record.token == token
            {
                record.state = State::Running;
            }
            Real::complete(slot, token, done)
        }
    }
    a_release_that_ignores_the_token_is_caught: REFUSING, "a stale token" {
        fn release(slot: Option<Record>, given: Token, saved: bool) -> (Option<Record>, Settled) {
            let token = slot.as_ref().map_or(given, |record| record.token);
            Real::release(slot, token, saved)
        }
    }
    an_abandonment_of_what_is_completed_is_caught:
        Setting { owners: 1, ..REFUSING }, "a completion was lost or changed before it expired"
    {
        fn abandon(mut slot: Option<Record>, token: Token) -> (Option<Record>, Settled) {
            if let Some(record) = &mut slot
                && record.token == token
            {
                record.state = State::Abandoned;
            }
            Real::abandon(slot, token)
        }
    }
    an_abandonment_that_ignores_the_token_is_caught: REFUSING, "a stale token" {
        fn abandon(slot: Option<Record>, given: Token) -> (Option<Record>, Settled) {
            let token = slot.as_ref().map_or(given, |record| record.token);
            Real::abandon(slot, token)
        }
    }
    a_purge_of_running_records_is_caught: REFUSING, "a purge changed what is not over" {
        fn purge(slot: Option<Record>) -> (Option<Record>, bool) {
            Real::purge(slot.filter(|record| record.state != State::Running))
        }
    }
}
