//! The core under hand-made schedules.
