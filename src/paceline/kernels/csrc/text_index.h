// An index of texts for n-gram and suffix decoding: where the n-grams of a few lengths occurred last.
//
// draft/text_index.py finds the same n-grams by searching all texts. Here hash chains find them, as compressors find
// matches: a hash table for each length maps an n-gram to the position after its latest occurrence, and `previous`
// leads from there to the earlier ones. lookup.cpp makes drafts from what is found.
//
//   position      0 1 2 3 4 5 6 7 8
//   stream        a b c d | a b c x      | is TEXT_END
//   table of 3    bucket of "a b c": latest 8
//   previous      8 -> 3, 3 -> 3 (there is none before)
#pragma once
#include <algorithm>
#include <chrono>
#include <deque>
#include <vector>

#include "paceline_native.h"

namespace {

// Number of a token, counted from the first one ever appended. It may wrap, as an index holds fewer than 2^31.
using Position = uint32_t;
using Text = std::vector<int32_t>;

constexpr int32_t TEXT_END = -1;  // behind every finished text; not a token id
constexpr int64_t PREFETCH = 32;  // tokens whose buckets are fetched together

// The base of the rolling hash differs in each process, so that nobody can write a text whose n-grams collide.
const uint64_t BASE =
    (static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) * 0x9e3779b97f4a7c15u ^
     0xd1342543de82ef95u) | 1;

uint64_t digit(int32_t token) { return static_cast<uint64_t>(static_cast<uint32_t>(token)) + 1; }

uint32_t tag_of(uint64_t hash) {
  hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93u;
  uint32_t tag = static_cast<uint32_t>(hash >> 32);
  return tag ? tag : 1;
}

struct Bucket {
  Position latest;  // the position after the latest occurrence
  uint32_t tag;     // of the n-gram; 0: the bucket is free
};

// The n-grams of one length: an open-addressing hash table with linear probing.
struct NgramTable {
  int64_t length;
  uint64_t power = 1;  // BASE^length: the weight of the token that leaves the window
  uint64_t hash = 0;   // rolling hash of the last `length` tokens of the open text
  std::vector<Bucket> buckets;
  size_t used = 0;
  std::vector<Position> previous;  // ring: by position, that after the occurrence before; itself if there is none

  explicit NgramTable(int64_t tokens) : length(tokens) {
    for (int64_t i = 0; i < tokens; i++) power *= BASE;
  }

  size_t mask() const { return buckets.size() - 1; }
  size_t next(size_t i) const { return (i + 1) & mask(); }

  void reserve(size_t ngrams) {
    if (ngrams * 4 <= buckets.size() * 3) return;
    size_t size = std::max<size_t>(buckets.size(), 64);
    while (ngrams * 4 > size * 3) size *= 2;
    std::vector<Bucket> old(size, Bucket{0, 0});
    buckets.swap(old);
    for (const Bucket& bucket : old) {
      if (!bucket.tag) continue;
      size_t i = bucket.tag & mask();
      while (buckets[i].tag) i = next(i);
      buckets[i] = bucket;
    }
  }

  // Buckets that were probed past the freed one move up into it.
  void erase(size_t freed) {
    used--;
    for (size_t i = next(freed); buckets[i].tag; i = next(i))
      if (((i - buckets[i].tag) & mask()) >= ((i - freed) & mask())) {
        buckets[freed] = buckets[i];
        freed = i;
      }
    buckets[freed].tag = 0;
  }
};

struct TextIndex {
  const pl_lookup rule;
  std::vector<NgramTable> tables;  // shortest n-grams first
  std::vector<int32_t> stream = std::vector<int32_t>(64);  // ring of all texts, each finished one with a TEXT_END
  Position begin = 0, end = 0;
  int64_t open_tokens = 0;              // of the text that still grows
  std::deque<int64_t> finished_lengths;  // oldest first

  explicit TextIndex(const pl_lookup& given) : rule(given) {
    for (int64_t i = 0; i < given.count; i++) {
      tables.emplace_back(given.lengths[i]);
      tables.back().previous.resize(stream.size());
    }
  }

  size_t ring(Position p) const { return p & (stream.size() - 1); }
  int32_t token(Position p) const { return stream[ring(p)]; }
  bool contains(Position p) const { return static_cast<Position>(p - begin) < static_cast<Position>(end - begin); }

  // Allocates all memory that `count` more tokens and a TEXT_END take, so that nothing after it can fail.
  void reserve(int64_t count) {
    size_t size = stream.size(), needed = static_cast<Position>(end - begin) + static_cast<size_t>(count) + 1;
    for (NgramTable& table : tables) table.reserve(table.used + static_cast<size_t>(count));
    if (needed <= size) return;
    while (size < needed) size *= 2;
    auto widen = [&](auto& old) {
      auto wider = old;
      wider.resize(size);
      for (Position p = begin; p != end; p++) wider[p & (size - 1)] = old[p & (old.size() - 1)];
      old.swap(wider);
    };
    for (NgramTable& table : tables) widen(table.previous);
    widen(stream);
  }

  void append(const int32_t* tokens, int64_t count) {
    reserve(count);
    for (int64_t i = 0; i < count; i++) stream[ring(end + static_cast<Position>(i))] = tokens[i];
    for (NgramTable& table : tables)
      for (int64_t done = 0; done < count; done += PREFETCH) index_tokens(table, done, std::min(PREFETCH, count - done));
    end += static_cast<Position>(count);
    open_tokens += count;
  }

  // Indexes the n-grams that `count` tokens continue, of which the first is the token `done` after `end`.
  void index_tokens(NgramTable& table, int64_t done, int64_t count) {
    uint32_t tags[PREFETCH];
    Position first = end + static_cast<Position>(done);
    int64_t offset = open_tokens + done;  // in the text
    for (int64_t i = 0; i < count; i++) {
      tags[i] = tag_of(table.hash);
      __builtin_prefetch(&table.buckets[tags[i] & table.mask()]);
      roll(table, first + static_cast<Position>(i), offset + i);
    }
    for (int64_t i = 0; i < count; i++)
      if (offset + i >= std::max(table.length, rule.first) && offset + i < rule.stop)
        insert(table, first + static_cast<Position>(i), tags[i]);
  }

  // Moves the window of the rolling hash over the token at p, which is number `offset` of its text.
  void roll(NgramTable& table, Position p, int64_t offset) const {
    table.hash = table.hash * BASE + digit(token(p));
    if (offset >= table.length) table.hash -= digit(token(p - static_cast<Position>(table.length))) * table.power;
  }

  void insert(NgramTable& table, Position p, uint32_t tag) {
    size_t i = tag & table.mask();
    for (; table.buckets[i].tag; i = table.next(i)) {
      Position& latest = table.buckets[i].latest;
      if (table.buckets[i].tag != tag || common_suffix(latest, p, table.length) != table.length) continue;
      table.previous[ring(p)] = latest;
      latest = p;
      return;
    }
    table.buckets[i] = {p, tag};
    table.used++;
    table.previous[ring(p)] = p;
  }

  // How many tokens, at most `limit`, are the same before both positions.
  int64_t common_suffix(Position p, Position q, int64_t limit) const {
    int64_t length = 0;
    while (length < limit && token(--p) == token(--q)) length++;
    return length;
  }

  void finish_text() {
    if (!open_tokens) return;
    reserve(0);
    finished_lengths.push_back(open_tokens);
    stream[ring(end++)] = TEXT_END;
    open_tokens = 0;
    for (NgramTable& table : tables) table.hash = 0;
  }

  int64_t drop_oldest_text() {
    int64_t length = finished_lengths.front();
    finished_lengths.pop_front();
    for (NgramTable& table : tables) {
      uint64_t hash = table.hash;
      table.hash = 0;
      for (int64_t offset = 0; offset < length; offset++) {
        Position p = begin + static_cast<Position>(offset);
        if (offset >= table.length) forget(table, p, tag_of(table.hash));
        roll(table, p, offset);
      }
      table.hash = hash;
    }
    begin += static_cast<Position>(length) + 1;
    return length;
  }

  // Erases the n-gram before p if its latest occurrence is there: p is the oldest, so there is no other.
  static void forget(NgramTable& table, Position p, uint32_t tag) {
    for (size_t i = tag & table.mask(); table.buckets[i].tag; i = table.next(i))
      if (table.buckets[i].tag == tag && table.buckets[i].latest == p) return table.erase(i);
  }

  // How many of a text's last tokens, at most `limit`, occur before a position.
  int64_t common_suffix(const Text& text, Position p, int64_t limit) const {
    int64_t length = 0;
    limit = std::min(limit, static_cast<int64_t>(text.size()));
    while (length < limit && contains(--p) && token(p) == text[text.size() - 1 - static_cast<size_t>(length)]) length++;
    return length;
  }

  // Sets tags[i] to the tag of the text's last n-gram of tables[i], and prefetches its bucket.
  void compute_tags(const Text& text, std::vector<uint32_t>& tags) const {
    uint64_t hash = 0, power = 1;
    int64_t length = 0;
    tags.resize(tables.size());
    for (size_t i = 0; i < tables.size(); i++) {
      if (text.size() < static_cast<size_t>(tables[i].length)) return;
      for (; length < tables[i].length; length++, power *= BASE) hash += power * digit(*(text.end() - 1 - length));
      tags[i] = tag_of(hash);
      if (tables[i].used) __builtin_prefetch(&tables[i].buckets[tags[i] & tables[i].mask()]);
    }
  }

  // Appends the positions after the `limit` latest occurrences of the text's last n-gram, whose tag is `tag`.
  void find_latest(const NgramTable& table, uint32_t tag, const Text& text, size_t limit, std::vector<Position>& found) const {
    if (text.size() < static_cast<size_t>(table.length) || !table.used) return;
    for (size_t i = tag & table.mask(); table.buckets[i].tag; i = table.next(i)) {
      Position p = table.buckets[i].latest;
      if (table.buckets[i].tag != tag || common_suffix(text, p, table.length) < table.length) continue;
      for (size_t count = 0; count < limit && contains(p); count++) {
        found.push_back(p);
        Position previous = table.previous[ring(p)];
        if (previous == p) return;
        p = previous;
      }
      return;
    }
  }

  // Appends the new tokens of a query (see pl_draft_ngrams), and returns the end of the text to look up.
  Text read_query(const int32_t* query) {
    const int32_t *tokens = query + 4, fresh = query[2], given = query[3];
    append(tokens, fresh);
    if (given) return Text(tokens + fresh, tokens + fresh + given);
    int64_t longest = tables.empty() ? 0 : tables.back().length;
    int64_t count = std::min<int64_t>(open_tokens, std::max(rule.depth, longest));
    Text text(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; i++) text[static_cast<size_t>(i)] = token(end - static_cast<Position>(count - i));
    return text;
  }
};

}  // namespace
