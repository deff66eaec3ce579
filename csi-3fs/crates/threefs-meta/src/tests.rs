//! Unit tests of the tree and its operations.

mod answers;
mod append_leases;
mod audit;
mod backends;
mod check;
mod concurrent;
mod control_plane;
mod fixture;
mod invariants;
mod lock_scope;
mod locks;
mod model;
mod permission;
mod quota;
mod recount;
mod removal;
mod renewals;
mod repair;
mod scope;
mod services;
mod snapshots;
mod trash;
mod tree;
