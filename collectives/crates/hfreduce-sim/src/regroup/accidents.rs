//! Members that die, stop for a while, or lose their network.

use super::{Event, Fault, Story};

impl Story {
    pub(super) fn accident(&mut self, at: usize) {
        let (whom, fault) = self.faults[at];
        if self.actors[whom].dead {
            return;
        }
        match fault {
            Fault::Killed => {
                self.actors[whom].dead = true;
                for at in 0..self.connections.len() {
                    let connection = &self.connections[at];
                    if connection.coordinator == whom || connection.member == whom {
                        self.send(at, whom, None);
                    }
                }
            }
            Fault::Stopped(span) => {
                self.actors[whom].stopped = true;
                if let Some(span) = span {
                    self.agenda.plan(self.agenda.now() + span, Event::Wake(whom));
                }
            }
            Fault::Unplugged => self.actors[whom].unplugged = true,
        }
        // A group that lost somebody breaks, and its members look for the next one.
        for one in 0..self.actors.len() {
            let broken = self.actors[one].group.is_some() && self.actors[one].list.contains(&whom);
            if broken && self.actors[one].core.is_none() {
                (self.actors[one].group, self.actors[one].agreed) = (None, None);
                self.try_again(one);
            }
        }
    }

    /// A rank that was stopped for a while comes back: the others take it in again.
    pub(super) fn wake(&mut self, whom: usize) {
        if self.actors[whom].dead {
            return;
        }
        self.actors[whom].stopped = false;
        for event in std::mem::take(&mut self.actors[whom].missed) {
            self.handle(event);
        }
        for one in 0..self.actors.len() {
            if self.actors[one].core.is_none() && !self.actors[one].dead {
                (self.actors[one].group, self.actors[one].agreed) = (None, None);
                self.try_again(one);
            }
        }
    }
}
