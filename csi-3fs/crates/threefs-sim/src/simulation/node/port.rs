//! Port of a node: admission of requests.
//!
//! Credits, sizes and classes are the product's ([`Credits`], `threefs_storage::admission`). This
//! is the sequence of one request, as in `fabric::rpc`: a request with a payload is offered, and
//! sent when its bytes are granted; it takes a call slot or is refused; a read reserves the bytes
//! of its reply; the reply releases everything.

use std::collections::BTreeMap;

use bytes::Bytes;
use fabric::rpc::{Budget, CreditRequest, Credits};
use threefs_core::message::{StorageRequest, class};
use threefs_core::time::Millis;

use crate::mutations::Mutation;
use crate::simulation::CallerId;

/// A request at the port.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub caller: CallerId,
    pub request: StorageRequest,
    pub payload: Bytes,
    pub expires: Option<Millis>,
    /// When its caller times out.
    pub deadline: u64,
    pub class: u8,
}

/// Budget that a request holds until it is answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldBudget {
    class: u8,
    connection: usize,
    request_bytes: usize,
    reply_bytes: usize,
}

/// Result of a request's admission.
pub(crate) enum Admission {
    /// Admitted to the replica.
    Admitted(Box<Incoming>, HeldBudget),
    /// All call slots are in use.
    Overloaded(CallerId),
    /// It waits for the bytes of its reply, or its caller has timed out.
    Nothing,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Offered,
    Granted,
    Reserving,
    Reserved,
}

/// Admission state of a node's port.
pub(crate) struct Port {
    gates: Vec<Gate>,
    waiting: BTreeMap<u64, (Incoming, Step)>,
    next_id: u64,
}

struct Gate {
    budget: Budget,
    calls: usize,
    requests: Credits<usize>,
    replies: Credits<usize>,
    tickets: BTreeMap<CreditRequest, u64>,
    reservations: BTreeMap<CreditRequest, u64>,
}

impl Gate {
    fn new(budget: &Budget) -> Self {
        let credits = |bytes: usize| Credits::new(bytes, bytes / budget.shares.max(1));
        Self {
            budget: *budget,
            calls: 0,
            requests: credits(budget.bytes_max),
            replies: credits(budget.reply_bytes_max),
            tickets: BTreeMap::new(),
            reservations: BTreeMap::new(),
        }
    }

    fn release(&mut self, budget: HeldBudget) {
        self.calls -= 1;
        self.requests.release(budget.connection, budget.request_bytes);
        self.replies.release(budget.connection, budget.reply_bytes);
    }

    /// The budget of a request once it is admitted.
    fn budget_of(&self, incoming: &Incoming) -> HeldBudget {
        let reply_bytes = match &incoming.request {
            StorageRequest::Read(read) | StorageRequest::ReadUpTo(read) => read.length as usize,
            StorageRequest::ReadMany(reads) => reads.bytes() as usize,
            StorageRequest::Repair(_) => crate::simulation::CHUNK_BYTES as usize,
            _ => 0,
        };
        HeldBudget {
            class: incoming.class,
            connection: incoming.caller.endpoint,
            request_bytes: match incoming.payload.len() {
                0 => 0,
                bytes => self.requests.credits_of(bytes),
            },
            reply_bytes: match reply_bytes {
                0 => 0,
                bytes => self.replies.credits_of(bytes),
            },
        }
    }
}

/// The class of a request at a port.
pub(crate) fn class_of(request: &StorageRequest, mutation: Mutation) -> u8 {
    match (request.class(), mutation) {
        (_, Mutation::OneBudget) => class::UPDATE,
        (hop, Mutation::OneBudgetForForwards) if (1..=class::HOP_MAX).contains(&hop) => 1,
        (class, _) => class,
    }
}

impl Port {
    pub(crate) fn new(budgets: &[Budget]) -> Self {
        let gates = budgets.iter().map(Gate::new).collect();
        Self { gates, waiting: BTreeMap::new(), next_id: 0 }
    }

    /// Whether no request is admitted or waiting.
    pub(crate) fn is_idle(&self) -> bool {
        let idle =
            |gate: &Gate| gate.calls == 0 && gate.requests.is_idle() && gate.replies.is_idle();
        self.waiting.is_empty() && self.gates.iter().all(idle)
    }

    /// Records a request, or the offer of one.
    pub(crate) fn offer(&mut self, incoming: Incoming) -> u64 {
        self.next_id += 1;
        let id = self.next_id;
        let gate = &mut self.gates[usize::from(incoming.class)];
        let step = if incoming.payload.is_empty() {
            Step::Granted
        } else {
            let CallerId { endpoint, volume, .. } = incoming.caller;
            let ticket = gate.requests.request(endpoint, volume, incoming.payload.len());
            gate.tickets.insert(ticket, id);
            Step::Offered
        };
        self.waiting.insert(id, (incoming, step));
        id
    }

    /// Whether it may be sent without a grant.
    pub(crate) fn is_granted(&self, id: u64) -> bool {
        matches!(self.waiting.get(&id), Some((_, Step::Granted)))
    }

    /// Requests that no longer wait: those that were granted their own bytes, and those that were
    /// granted the bytes of their reply.
    pub(crate) fn grant(&mut self, now: u64) -> (Vec<u64>, Vec<u64>) {
        self.drop_expired(now);
        let (mut granted_ids, mut reserved_ids) = (Vec::new(), Vec::new());
        for gate in &mut self.gates {
            let tickets = gate.requests.grant();
            granted_ids.extend(tickets.iter().filter_map(|ticket| gate.tickets.remove(ticket)));
            let tickets = gate.replies.grant();
            reserved_ids
                .extend(tickets.iter().filter_map(|ticket| gate.reservations.remove(ticket)));
        }
        for (ids, step) in [(&granted_ids, Step::Granted), (&reserved_ids, Step::Reserved)] {
            for id in ids {
                if let Some(waiting) = self.waiting.get_mut(id) {
                    waiting.1 = step;
                }
            }
        }
        (granted_ids, reserved_ids)
    }

    /// Drops requests whose callers have timed out.
    fn drop_expired(&mut self, now: u64) {
        for gate in &mut self.gates {
            let expired = |id: &u64| {
                self.waiting.get(id).is_none_or(|(incoming, _)| incoming.deadline <= now)
            };
            let offers: Vec<CreditRequest> =
                gate.tickets.iter().filter(|(_, id)| expired(id)).map(|(it, _)| *it).collect();
            let reservations: Vec<CreditRequest> =
                gate.reservations.iter().filter(|(_, id)| expired(id)).map(|(it, _)| *it).collect();
            for ticket in offers {
                let id = gate.tickets.remove(&ticket).unwrap_or_default();
                if let Some((incoming, _)) = self.waiting.remove(&id) {
                    gate.requests.cancel(incoming.caller.endpoint, ticket);
                }
            }
            for ticket in reservations {
                let id = gate.reservations.remove(&ticket).unwrap_or_default();
                if let Some((incoming, _)) = self.waiting.remove(&id) {
                    gate.replies.cancel(incoming.caller.endpoint, ticket);
                    let mut budget = gate.budget_of(&incoming);
                    budget.reply_bytes = 0;
                    gate.release(budget);
                }
            }
        }
    }

    /// Admits a granted request, which has been sent unless its caller has timed out.
    pub(crate) fn enter(&mut self, id: u64, now: u64) -> Admission {
        let Some((incoming, step)) = self.waiting.remove(&id) else { return Admission::Nothing };
        let gate = &mut self.gates[usize::from(incoming.class)];
        let budget = gate.budget_of(&incoming);
        if matches!(step, Step::Reserved) {
            return Admission::Admitted(Box::new(incoming), budget);
        }
        let declined = budget.request_bytes > 0 && incoming.deadline <= now;
        if declined || gate.calls == gate.budget.calls_max {
            gate.requests.release(budget.connection, budget.request_bytes);
            return if declined {
                Admission::Nothing
            } else {
                Admission::Overloaded(incoming.caller)
            };
        }
        gate.calls += 1;
        if budget.reply_bytes == 0 {
            return Admission::Admitted(Box::new(incoming), budget);
        }
        let ticket =
            gate.replies.request(budget.connection, incoming.caller.volume, budget.reply_bytes);
        gate.reservations.insert(ticket, id);
        self.waiting.insert(id, (incoming, Step::Reserving));
        Admission::Nothing
    }

    /// Releases the budget of an answered request.
    pub(crate) fn give_back(&mut self, budget: HeldBudget) {
        self.gates[usize::from(budget.class)].release(budget);
    }
}
