//! What a world can do by itself, and how equal worlds become one.

use super::*;

impl World {
    pub(super) fn new(setting: Setting) -> Self {
        let process = Process {
            restarted: false,
            claims: 0,
            current: NONE,
            seen: NONE,
            seen_released: false,
        };
        let run = Run {
            phase: Phase::Unused,
            holds: false,
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

    pub(super) fn heard_won(&mut self, at: usize) {
        if self.runs[at].phase == Phase::Asking {
            self.runs[at].phase = Phase::Holding;
        }
    }

    pub(super) fn over(&mut self, process: usize, at: usize) {
        self.runs[at].phase = Phase::Over;
        self.processes[process].current = NONE;
    }

    /// A running record whose owner is silent or whose time is over.
    pub(super) fn gone(&self, record: &Kept) -> bool {
        let silent = self.leases[usize::from(record.instance)] == 0;
        record.state == State::Running && (silent || record.run_left == 0)
    }

    /// Drops what can make no difference any more, so that equal futures are one world.
    pub(super) fn forget_the_past(&mut self) {
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
                if run.network & ASKS == 0 {
                    run.replaces = NONE;
                    run.holds = false;
                }
                // What a lost caller is told is read by nobody, and what a token that is not the
                // record's asks for was tried already (`fences`).
                run.network &= !WON;
                if run.network & ASKS == 0 && usize::from(current) != at {
                    run.network = 0;
                }
                if run.network & ASKS == 0 && usize::from(current) != at {
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
    pub(super) fn renumber_lives(&mut self) {
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
    pub(super) fn sorted(&self, owners: usize) -> Self {
        let rank = |process: usize| {
            let this = self.processes[process];
            let mut rank = (u64::from(this.claims) << 1) | u64::from(this.restarted);
            for at in process * CLAIMS_EACH..(process + 1) * CLAIMS_EACH {
                let run = self.runs[at];
                let ours = self
                    .record
                    .is_some_and(|record| usize::from(record.token) == at);
                rank = (rank << 3) | run.phase as u64;
                rank = (rank << 6) | u64::from(run.network);
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
pub(super) struct Mixer(u64);

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
