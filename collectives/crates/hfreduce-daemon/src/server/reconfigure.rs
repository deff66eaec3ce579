//! A session's rank goes on with other members: the daemon agrees and connects for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric::arena::Arena;

use super::admission::CONNECTS_WITHIN;
use super::connection::ClientConnection;
use super::session::{Next, Session};
use crate::protocol::{ANSWER, Reconfigure, Reconfigured, Request, Response, await_message};
use hfreduce_core::error::ErrorKind;
use hfreduce_engine::communicator::Communicator;
use hfreduce_engine::endpoint::ReconfigureSource;

impl Session<'_> {
    /// From one epoch to the next, or to none yet: it may ask again.
    pub(crate) fn reconfigure(&mut self, ask: &Reconfigure) -> Next {
        let Self { client, communicator, arena, .. } = self;
        if ask.retired {
            arena.retire();
        }
        let timeout = Duration::from_millis(ask.timeout_ms).min(CONNECTS_WITHIN);
        let Ok(origin) = ReconfigureSource::of(communicator) else { return Next::End };
        let (members, completed) = (&ask.members, Some(ask.completed));
        let watch = &mut || client.is_over();
        let following = communicator.reconfigure_as(origin, members, completed, timeout, watch);
        // The rank has ended what was under way, and waits for this answer alone. A list that nobody
        // could go on with leaves the epoch as it was.
        if following.is_ok() || communicator.error().is_some() {
            self.calls.clear();
            self.told = true;
        }
        let next = match following {
            Ok(next) => next,
            Err(error) => {
                self.client.line.send(&Response::Refused(Box::new(error)));
                // The end of its line tells it that asking again is in vain.
                return if self.client.is_stopped() { Next::End } else { Next::Wait };
            }
        };
        let began = send_reconfigured(&mut self.client, &next, &self.arena).and_then(|arena| {
            if !Arc::ptr_eq(&self.arena, &arena) {
                self.reached = 0;
            }
            self.arena = arena;
            next.watch_client(self.client.line.stream()).map_err(|error| error.to_string())
        });
        self.communicator = next;
        self.told = false;
        self.heard = Instant::now();
        if let Err(why) = began {
            self.fail(ErrorKind::PeerDied, why);
            return Next::End;
        }
        Next::Wait
    }
}

/// Tells a rank of its new epoch, and hands over its memory there if it is not `before`; which it is.
pub(crate) fn send_reconfigured(
    client: &mut ClientConnection<'_>,
    communicator: &Communicator,
    before: &Arc<Arena>,
) -> Result<Arc<Arena>, String> {
    let origin = ReconfigureSource::of(communicator)?;
    let arena = communicator.arena()?;
    let other_memory = !Arc::ptr_eq(&arena, before);
    client.line.send(&Response::Reconfigured(Box::new(Reconfigured {
        infos: origin.infos(),
        rank: communicator.rank(),
        epoch: communicator.epoch(),
        channels: communicator.channels(),
        other_memory,
    })));
    if other_memory {
        match await_message(&mut client.line, Instant::now() + ANSWER)? {
            Request::Memory => client.entrust(&arena).map_err(|error| error.to_string())?,
            _ => return Err("it did not ask for its memory when it was its turn".to_owned()),
        }
    }
    Ok(arena)
}
