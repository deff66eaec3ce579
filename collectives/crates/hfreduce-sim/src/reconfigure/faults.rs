//! Members that exit, are suspended, or lose their network.

use super::{Event, Fault, Simulation};

impl Simulation {
    pub(super) fn apply_fault(&mut self, at: usize) {
        let (victim, fault) = self.faults[at];
        if self.actors[victim].dead {
            return;
        }
        match fault {
            Fault::Killed => {
                self.actors[victim].dead = true;
                for at in 0..self.connections.len() {
                    let connection = &self.connections[at];
                    if connection.coordinator == victim || connection.member == victim {
                        self.send(at, victim, None);
                    }
                }
            }
            Fault::Stopped(span) => {
                self.actors[victim].stopped = true;
                if let Some(span) = span {
                    self.event_queue.plan(self.event_queue.now() + span, Event::Wake(victim));
                }
            }
            Fault::Unplugged => self.actors[victim].unplugged = true,
        }
        // A group that lost a member breaks, and its members form the next one.
        for id in 0..self.actors.len() {
            let broken = self.actors[id].group.is_some() && self.actors[id].list.contains(&victim);
            if broken && self.actors[id].core.is_none() {
                (self.actors[id].group, self.actors[id].agreed) = (None, None);
                self.retry(id);
            }
        }
    }

    /// Resumes a suspended rank: the others include it again.
    pub(super) fn wake(&mut self, victim: usize) {
        if self.actors[victim].dead {
            return;
        }
        self.actors[victim].stopped = false;
        for event in std::mem::take(&mut self.actors[victim].missed) {
            self.handle(event);
        }
        for id in 0..self.actors.len() {
            if self.actors[id].core.is_none() && !self.actors[id].dead {
                (self.actors[id].group, self.actors[id].agreed) = (None, None);
                self.retry(id);
            }
        }
    }
}
